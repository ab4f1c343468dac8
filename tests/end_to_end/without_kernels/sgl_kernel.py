"""Stands in for the CUDA kernels of SGLang, where a CPU has none: everything can be imported, and nothing be called."""

import importlib.abc
import importlib.machinery
import sys
import types


class _Missing:
    def __init__(self, name):
        self.__name__ = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{self.__name__} is a kernel for CUDA")


class _Module(types.ModuleType):
    def __getattr__(self, name):
        return getattr(_Missing(self.__name__), name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith("sgl_kernel.") else None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


__path__ = []
sys.modules[__name__].__class__ = _Module
sys.meta_path.insert(0, _Finder())
