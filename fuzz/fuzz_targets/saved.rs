//! Saved record: any bytes are refused or read; what is read is written back with the same
//! meaning, and no name in it leads out of its directory.
#![no_main]

use firn_fuzz::Input;
use firn_transact::shadow::saved::{SEAL, Saved};
use firn_trust::is_component;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: Input| {
    if let Ok(saved) = Saved::decode(&input.bytes(&SEAL)) {
        let names = saved.original.iter().flat_map(|original| &original.names);
        for (name, _) in saved.path.iter().chain(names) {
            assert!(is_component(name), "{name:?}");
        }
        for segment in &saved.segment {
            assert!(is_component(segment.at.as_bytes()), "{:?}", segment.at);
        }
        assert_eq!(Saved::decode(&saved.encode()), Ok(saved));
    }
});
