//! Inputs that several targets share.

use arbitrary::Arbitrary;
use firn_format::sealed::Seal;
use firn_transact::record::Record;
use firn_trust::is_component;

/// Bytes for the parser of a sealed structure.
#[derive(Arbitrary, Debug)]
pub enum Input {
    /// Bytes as they are.
    Bytes(Vec<u8>),
    /// A payload behind a header that is right: what stands behind the checksum is tried.
    Sealed(Vec<u8>),
}

impl Input {
    /// The bytes to parse.
    pub fn bytes(self, seal: &Seal) -> Vec<u8> {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Sealed(payload) => seal.seal(&payload),
        }
    }
}

/// Panics where a name of a redo record is not a single path component, or its scope not a path of such.
pub fn must_stay_inside(record: &Record) {
    let scope = &record.scope;
    assert!(
        scope.is_empty() || scope.split(|&byte| byte == b'/').all(is_component),
        "{scope:?}"
    );
    for item in &record.items {
        for (_, name) in item.leaves.iter().chain(&item.comes).chain(&item.stays) {
            assert!(is_component(name), "{name:?}");
        }
        let staged = [&item.new_at, &item.anchor_at, &item.twin_at, &item.kept_at];
        for (nest, name) in staged.into_iter().flatten() {
            assert!(
                is_component(nest.as_bytes()) && is_component(name.as_bytes()),
                "{nest:?} {name:?}"
            );
        }
    }
}
