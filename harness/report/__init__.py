"""`harness report`: one page of HTML that says what the kept records say, for somebody who has to choose.

Every file but two gathers one section from records, by what other modules of the harness work out; content.py puts them
together and page.py, with page.html.j2 and page.css, shows them.
"""
