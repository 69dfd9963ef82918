//! Chunk and slab words: a word that is read as a state is that state's word.
#![no_main]

use firn_format::geometry::{CHUNK_MAX, CHUNK_MIN};
use firn_format::slab::{Class, SlabState};
use libfuzzer_sys::fuzz_target;

// A state, or (the rest of the numbers) the word itself: the states are four of 2^32 words.
fuzz_target!(|input: (u8, u32, u8)| {
    let (choice, other, shift) = input;
    let word = match choice {
        0 => Class::to_word(None),
        1 => Class::to_word(Some(Class::Small)),
        2 => Class::to_word(Some(Class::Medium)),
        3 => Class::to_word(Some(Class::Whole)),
        4 => SlabState::Free.to_word(),
        5 => SlabState::Leased.to_word(),
        6 => SlabState::Sealed.to_word(),
        _ => other,
    };
    match Class::from_word(word) {
        Ok(class) => {
            assert_eq!(Class::to_word(class), word);
            let chunk_bytes = (CHUNK_MIN << (shift % 15)).min(CHUNK_MAX);
            if let Some(class) = class {
                assert_eq!(chunk_bytes % class.slab_bytes(chunk_bytes), 0);
            }
        }
        Err(found) => assert!(found == word && choice > 3),
    }
    match SlabState::from_word(word) {
        Ok(state) => assert_eq!(state.to_word(), word),
        Err(found) => assert!(found == word && !(4..=6).contains(&choice)),
    }
});
