//! Journal records: bytes are refused, or are exactly what the record is written as.
#![no_main]

use firn_format::record::Record;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(record) = Record::decode(bytes) {
        assert_eq!(record.encode(), bytes);
    }
});
