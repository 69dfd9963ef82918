//! Ordered map that stores its first entry without allocating memory.
//!
//! Most files have only one extent, of one piece, and a `BTreeMap` allocates half a kibibyte for its first entry.
//!
//! Invariants
//! * `Many` has two entries or more.
//! * Lookup is O(log n).

use std::collections::BTreeMap;

/// The map.
#[derive(Clone, Debug)]
pub(crate) enum SmallMap<K, V> {
    /// No entry or one.
    Few(Option<(K, V)>),
    /// Two entries or more.
    Many(BTreeMap<K, V>),
}

impl<K, V> Default for SmallMap<K, V> {
    fn default() -> Self {
        Self::Few(None)
    }
}

impl<K: Ord, V> SmallMap<K, V> {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Few(entry) => usize::from(entry.is_some()),
            Self::Many(map) => map.len(),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn get(&self, key: &K) -> Option<&V> {
        match self {
            Self::Few(entry) => entry.as_ref().filter(|(k, _)| k == key).map(|(_, v)| v),
            Self::Many(map) => map.get(key),
        }
    }

    pub(crate) fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        match self {
            Self::Few(entry) => entry.as_mut().filter(|(k, _)| k == key).map(|(_, v)| v),
            Self::Many(map) => map.get_mut(key),
        }
    }

    pub(crate) fn insert(&mut self, key: K, value: V) {
        match self {
            Self::Few(entry) => match entry.take_if(|(k, _)| *k != key) {
                None => *entry = Some((key, value)),
                Some(first) => *self = Self::Many(BTreeMap::from([first, (key, value)])),
            },
            Self::Many(map) => {
                map.insert(key, value);
            }
        }
    }

    pub(crate) fn remove(&mut self, key: &K) {
        match self {
            Self::Few(entry) => {
                entry.take_if(|(k, _)| k == key);
            }
            Self::Many(map) => {
                map.remove(key);
                if map.len() == 1 {
                    *self = Self::Few(map.pop_first());
                }
            }
        }
    }

    /// Returns the entry with the largest key that is at most `key`.
    pub(crate) fn at_or_before(&self, key: &K) -> Option<(&K, &V)> {
        match self {
            Self::Few(entry) => entry
                .as_ref()
                .filter(|(k, _)| k <= key)
                .map(|(k, v)| (k, v)),
            Self::Many(map) => map.range(..=key).next_back(),
        }
    }

    /// Returns the entry with the largest key below `key`.
    pub(crate) fn before_mut(&mut self, key: &K) -> Option<(&K, &mut V)> {
        match self {
            Self::Few(entry) => entry
                .as_mut()
                .filter(|(k, _)| k < key)
                .map(|(k, v)| (&*k, v)),
            Self::Many(map) => map.range_mut(..key).next_back(),
        }
    }

    pub(crate) fn last(&self) -> Option<(&K, &V)> {
        match self {
            Self::Few(entry) => entry.as_ref().map(|(k, v)| (k, v)),
            Self::Many(map) => map.last_key_value(),
        }
    }

    /// Returns the entries from `key` on, in order.
    pub(crate) fn from(&self, key: K) -> impl Iterator<Item = (&K, &V)> {
        // Both variants need the same iterator type, so one half of the chain is always empty.
        let (single_entry, map_entries) = match self {
            Self::Few(entry) => (entry.as_ref().filter(|(k, _)| *k >= key), None),
            Self::Many(map) => (None, Some(map.range(key..))),
        };
        single_entry
            .map(|(k, v)| (k, v))
            .into_iter()
            .chain(map_entries.into_iter().flatten())
    }

    /// Returns all entries in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        // Both variants need the same iterator type, so one half of the chain is always empty.
        let (single_entry, map_entries) = match self {
            Self::Few(entry) => (entry.as_ref(), None),
            Self::Many(map) => (None, Some(map.iter())),
        };
        single_entry
            .map(|(k, v)| (k, v))
            .into_iter()
            .chain(map_entries.into_iter().flatten())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn assert_same(map: &mut SmallMap<u64, u8>, model: &mut BTreeMap<u64, u8>) {
        assert!(map.iter().eq(model.iter()));
        assert_eq!(map.len(), model.len());
        assert_eq!(matches!(map, SmallMap::Many(_)), model.len() >= 2);
        assert_eq!(map.last(), model.last_key_value());
        for key in 0..7 {
            assert_eq!(map.get(&key), model.get(&key));
            assert_eq!(map.get_mut(&key), model.get_mut(&key));
            assert_eq!(map.at_or_before(&key), model.range(..=key).next_back());
            assert_eq!(map.before_mut(&key), model.range_mut(..key).next_back());
            assert!(map.from(key).eq(model.range(key..)));
        }
    }

    proptest! {
        #[test]
        fn the_map_agrees_with_an_ordered_map(
            ops in proptest::collection::vec((0u64..6, any::<u8>(), any::<bool>()), 1..40)
        ) {
            let mut map = SmallMap::default();
            let mut model = BTreeMap::new();
            for (key, value, remove) in ops {
                if remove {
                    map.remove(&key);
                    model.remove(&key);
                } else {
                    map.insert(key, value);
                    model.insert(key, value);
                }
                assert_same(&mut map, &mut model);
            }
        }
    }
}
