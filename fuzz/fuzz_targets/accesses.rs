//! Access list of a node: any bytes are refused or read, and what is read can be tested beside another.
#![no_main]

use arbitrary::Arbitrary;
use firn_conflict::{Published, test};
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
struct Input {
    bytes: Vec<u8>,
    /// Payloads behind a header that is right: what stands behind the checksum is tried.
    sealed: [Vec<u8>; 2],
}

fn seal(payload: &[u8]) -> Vec<u8> {
    let mut bytes = b"FIRNACCS".to_vec();
    bytes.extend_from_slice(&1u32.to_le_bytes());
    bytes.extend_from_slice(&crc32c::crc32c(payload).to_le_bytes());
    bytes.extend_from_slice(&(payload.len() as u64).to_le_bytes());
    bytes.extend_from_slice(payload);
    bytes
}

fuzz_target!(|input: Input| {
    let _ = Published::decode(&input.bytes);
    let lists: Vec<_> = input.sealed.iter().filter_map(|p| Published::decode(&seal(p)).ok()).collect();
    for list in &lists {
        assert_eq!(Published::decode(&list.encode()).as_ref(), Ok(list));
    }
    let report = test(&lists);
    for conflict in &report.conflicts {
        let _ = conflict.to_string();
    }
});
