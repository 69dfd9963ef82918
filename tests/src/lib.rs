//! System tests of the built firn binary: mounts, faults, public suites, real programs.
