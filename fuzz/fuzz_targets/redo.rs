//! Redo record: any bytes are refused or read; what is read is written back with the same meaning.
#![no_main]

use firn_fuzz::Input;
use firn_held::record::{Record, SEAL};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: Input| {
    if let Ok(record) = Record::decode(&input.bytes(&SEAL)) {
        assert_eq!(Record::decode(&record.encode()), Ok(record));
    }
});
