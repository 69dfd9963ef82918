# By make_stubs.py.
