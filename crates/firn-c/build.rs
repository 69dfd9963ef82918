//! Names the shared library: programs that are linked with it ask for this interface version.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libfirn.so.0");
}
