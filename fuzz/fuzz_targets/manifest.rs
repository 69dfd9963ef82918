//! Manifest of a backup: any bytes are refused or read; what is read is written back with the same meaning.
#![no_main]

use firn_fuzz::Input;
use firn_held::backup::manifest::{Manifest, SEAL};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: Input| {
    if let Ok(manifest) = Manifest::decode(&input.bytes(&SEAL)) {
        assert_eq!(Manifest::decode(&manifest.encode()), Ok(manifest));
    }
});
