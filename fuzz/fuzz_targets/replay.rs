//! Replay: any bytes are read without harm; a journal that was written is read as it was, and one
//! that was damaged is whole again after it was opened.
#![no_main]

use arbitrary::Arbitrary;
use firn_arena::journal::{Journal, Memory, replay};
use firn_format::journal::{HALF_HEADER_BYTES, encode_half_header};
use firn_format::record::Record;
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
enum Input {
    /// A region; with a generation, its first half has a good header.
    Bytes {
        generation: Option<u64>,
        bytes: Vec<u8>,
    },
    /// A journal to which these records, as far as they are some, were appended, with damage.
    Records {
        half_words: u8,
        records: Vec<Vec<u8>>,
        damage: Vec<(u16, u8)>,
    },
}

/// The smallest region tried: two headers and nothing else.
const BYTES_MIN: usize = 2 * HALF_HEADER_BYTES;

fuzz_target!(|input: Input| match input {
    Input::Bytes {
        generation,
        mut bytes,
    } => {
        bytes.resize(bytes.len().next_multiple_of(16).max(BYTES_MIN), 0);
        if let Some(generation) = generation {
            bytes[..HALF_HEADER_BYTES].copy_from_slice(&encode_half_header(generation));
        }
        heals(Memory(bytes));
    }
    Input::Records {
        half_words,
        records,
        damage,
    } => {
        let medium = Memory(vec![0; BYTES_MIN + 16 * usize::from(half_words)]);
        let mut journal = Journal::create(medium);
        for record in records
            .iter()
            .filter_map(|bytes| Record::decode(bytes).ok())
        {
            let before = journal.ledger().clone();
            if journal.append(&record).is_err() {
                assert_eq!(
                    journal.ledger(),
                    &before,
                    "a refused record changes nothing"
                );
            }
        }
        let ledger = journal.ledger().clone();
        let mut medium = journal.into_medium();
        let found = replay(&medium);
        assert_eq!(found.damage, []);
        assert_eq!(found.ledger, ledger);
        for (at, bits) in damage {
            let at = usize::from(at) % medium.0.len();
            medium.0[at] ^= bits;
        }
        heals(medium);
    }
});

/// Opening takes a snapshot. Where that fits, what was found is there again, without damage.
fn heals(medium: Memory) {
    let found = replay(&medium);
    let (journal, opened) = Journal::open(medium);
    assert_eq!(opened.ledger, found.ledger);
    assert_eq!(opened.damage, found.damage);
    assert_eq!(journal.ledger(), &found.ledger);
    let used_up = journal.free_bytes() == 0;
    let again = replay(&journal.into_medium());
    if !used_up {
        assert_eq!(again.damage, []);
        assert_eq!(again.ledger, found.ledger);
    }
}
