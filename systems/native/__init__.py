"""C++ sources, and what compiles and loads them."""
