//! Access list of a host: any bytes are refused or read, and what is read can be tested beside another
//! and has no name that leads out of its directory.
#![no_main]

use arbitrary::Arbitrary;
use firn_transact::conflict::{AccessList, SEAL, find_conflicts};
use firn_trust::is_component;
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
struct Input {
    bytes: Vec<u8>,
    /// Payloads behind a header that is right: what stands behind the checksum is tried.
    sealed: [Vec<u8>; 2],
}

fuzz_target!(|input: Input| {
    let _ = AccessList::decode(&input.bytes);
    let lists: Vec<_> = input
        .sealed
        .iter()
        .filter_map(|p| AccessList::decode(&SEAL.seal(p)).ok())
        .collect();
    for list in &lists {
        let names = list
            .used
            .iter()
            .chain(list.changed.iter().map(|(name, _)| name));
        for name in names
            .map(|name| &name.name[..])
            .chain([list.host.as_bytes()])
        {
            assert!(is_component(name), "{name:?}");
        }
        assert_eq!(AccessList::decode(&list.encode()).as_ref(), Ok(list));
    }
    let report = find_conflicts(&lists);
    for conflict in &report.conflicts {
        let _ = conflict.to_string();
    }
});
