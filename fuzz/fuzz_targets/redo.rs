//! Redo record: any bytes are refused or read; what is read is written back with the same
//! meaning, and no name in it leads out of its directory.
#![no_main]

use firn_fuzz::{Input, must_stay_inside};
use firn_transact::record::{Record, SEAL};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: Input| {
    if let Ok(record) = Record::decode(&input.bytes(&SEAL)) {
        must_stay_inside(&record);
        assert_eq!(Record::decode(&record.encode()), Ok(record));
    }
});
