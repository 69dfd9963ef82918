//! Tests of libfabric, as it is installed.

mod ofi_abi;
mod ofi_providers;
