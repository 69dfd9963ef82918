//! Saved record: any bytes are refused or read; what is read is written back with the same meaning.
#![no_main]

use firn_fuzz::Input;
use firn_held::shadow::saved::{SEAL, Saved};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: Input| {
    if let Ok(saved) = Saved::decode(&input.bytes(&SEAL)) {
        assert_eq!(Saved::decode(&saved.encode()), Ok(saved));
    }
});
