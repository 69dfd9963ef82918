//! Manifest of a backup: any bytes are refused or read; what is read is written back with the same
//! meaning, and no name in it leads out of its directory.
#![no_main]

use firn_fuzz::{Input, must_stay_inside};
use firn_transact::backup::manifest::{Manifest, SEAL};
use firn_trust::is_component;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: Input| {
    if let Ok(manifest) = Manifest::decode(&input.bytes(&SEAL)) {
        must_stay_inside(&manifest.record);
        for path in manifest.known.iter().flat_map(|known| &known.paths) {
            assert!(
                path.split(|&byte| byte == b'/').all(is_component),
                "{path:?}"
            );
        }
        for stored in &manifest.stored {
            let file = stored.content.iter().map(|content| &content.file);
            for name in [&stored.at.0, &stored.at.1].into_iter().chain(file) {
                assert!(is_component(name.as_bytes()), "{name:?}");
            }
        }
        assert_eq!(Manifest::decode(&manifest.encode()), Ok(manifest));
    }
});
