//! Live table: any header and any cells are read or refused; no cell belongs to two entries.
#![no_main]

use arbitrary::Arbitrary;
use firn_format::live::{CELL_BYTES, Header, LOOKUPS_AT, read_contents};
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
enum Input {
    /// A header as it is.
    Header(Vec<u8>),
    /// Cells as they are.
    Cells(Vec<u8>),
    /// Cells whose seals are right: what stands behind them is tried.
    Sealed(Vec<u8>),
}

fuzz_target!(|input: Input| match input {
    Input::Header(bytes) => {
        if let Ok(header) = Header::decode(&bytes) {
            let encoded = header.encode().expect("what was read fits");
            assert_eq!(Header::decode(&encoded), Ok(header));
        }
    }
    Input::Cells(bytes) => read(&bytes),
    Input::Sealed(bytes) => read(&sealed(bytes)),
});

fn read(bytes: &[u8]) {
    let contents = read_contents(bytes);
    let count = bytes.len() / CELL_BYTES;
    let nodes = contents.nodes.iter().map(|stored| &stored.cells);
    let handles = contents.handles.iter().map(|stored| &stored.cells);
    let requests = contents.requests.iter().map(|stored| &stored.cells);
    let transactions = contents.transactions.iter().map(|stored| &stored.cells);
    let undone_scopes = contents.undone_scopes.iter().map(|stored| &stored.cells);
    let file_locks = contents.file_locks.iter().map(|stored| &stored.cells);
    let named = nodes.chain(handles).chain(requests);
    for cells in named.chain(transactions).chain(undone_scopes).chain(file_locks) {
        assert!(cells.iter().all(|cell| (*cell as usize) < count));
    }
    for stored in &contents.file_locks {
        assert!(stored.entry.first <= stored.entry.last);
    }
}

fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    for cell in bytes.chunks_exact_mut(CELL_BYTES) {
        // The tag of a node: its count of look-ups is not sealed.
        let sum = if cell[4] == b'N' {
            let before = crc32c::crc32c(&cell[4..LOOKUPS_AT]);
            crc32c::crc32c_append(before, &cell[LOOKUPS_AT + 8..])
        } else {
            crc32c::crc32c(&cell[4..])
        };
        cell[..4].copy_from_slice(&sum.max(1).to_ne_bytes());
    }
    bytes
}
