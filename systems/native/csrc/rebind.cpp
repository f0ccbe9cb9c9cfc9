// Points an existing torch storage at other memory it does not own. Needed where torch lacks
// UntypedStorage._swap_data_ptr_ (2.11). Only c10 headers, and a plain C interface: `storage` is the storage's
// `_cdata`.

#include <c10/core/StorageImpl.h>

extern "C" void rebind(void* storage, void* pointer, int64_t nbytes) {
    auto* impl = static_cast<c10::StorageImpl*>(storage);
    impl->set_data_ptr_noswap(c10::DataPtr(pointer, impl->device()));  // no deleter: the memory has another owner
    impl->set_nbytes(static_cast<size_t>(nbytes));
}
