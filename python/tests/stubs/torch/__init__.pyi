# Of torch 2.15.0, by make_stubs.py.
from typing import Any

def save(obj: Any, f: Any, pickle_module: Any=..., pickle_protocol: int=..., _use_new_zipfile_serialization: bool=..., _disable_byteorder_record: bool=...) -> Any: ...