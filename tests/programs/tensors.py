"""Checkpoints of PyTorch on the CPU and of safetensors.

usage: tensors.py write|check DIR [unshared]
unshared: without files that are written through a shared mapping
"""
import sys

import numpy as np
import safetensors.numpy
import safetensors.torch
import torch

verb, top = sys.argv[1:3]
shared = len(sys.argv) == 3


def state():
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(600, 900), torch.nn.ReLU(), torch.nn.Linear(900, 300))
    model(torch.ones(2, 600)).sum().backward()
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    return model.state_dict(), optimizer.state_dict()


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def loads(path):
    yield torch.load(path)
    # Mapping a checkpoint came with version 2.1.
    if tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 1):
        yield torch.load(path, mmap=True)


model, optimizer = state()
arrays = {name: tensor.numpy() for name, tensor in model.items()}
if verb == 'write':
    torch.save({'model': model, 'optimizer': optimizer}, top + '/zip.pt')
    torch.save({'model': model, 'optimizer': optimizer}, top + '/legacy.pt', _use_new_zipfile_serialization=False)
    safetensors.torch.save_file(model, top + '/torch.safetensors')
    safetensors.numpy.save_file(arrays, top + '/numpy.safetensors')
    if shared:
        mapped = torch.from_file(top + '/mapped', shared=True, size=100000)
        mapped.copy_(torch.arange(100000.0))
        np.memmap(top + '/memmap', dtype='f8', mode='w+', shape=(300, 300))[:] = 7
    else:
        np.arange(100000, dtype='f4').tofile(top + '/mapped')
        np.full((300, 300), 7.0).tofile(top + '/memmap')
for name in 'zip.pt', 'legacy.pt':
    for found in loads(f'{top}/{name}') if name == 'zip.pt' else [torch.load(f'{top}/{name}')]:
        assert same(found, {'model': model, 'optimizer': optimizer}), name
assert same(safetensors.torch.load_file(top + '/torch.safetensors'), dict(model))
found = safetensors.numpy.load_file(top + '/numpy.safetensors')
assert all((found[name] == arrays[name]).all() for name in arrays)
with safetensors.safe_open(top + '/torch.safetensors', 'pt') as opened:
    assert torch.equal(opened.get_slice('0.weight')[3:7], model['0.weight'][3:7])
assert torch.equal(torch.from_file(top + '/mapped', shared=False, size=100000), torch.arange(100000.0))
assert (np.memmap(top + '/memmap', dtype='f8', mode='r') == 7).all()
print('all is as it was')
