//! Where what a host wrote ends: the cuts of the file, as they concern the frames of one index.
//!
//! A cut hides only what its host had seen: of each index the frames that begin before a certain byte ([`Limit`]), and
//! of its own index those before the cut. A frame that no cut had seen ends nowhere, whatever its epoch is. A host that
//! makes the file longer writes a frame that hides nothing ([`Growth`]); a later cut hides that frame as it does bytes.
//!
//! So the rule needs no order of cuts: a frame ends at the shortest length of all cuts that had seen it.

use serde::{Deserialize, Serialize};

use crate::run::FILE_BYTES_MAX;

/// Frames of an index that begin before `until` end at `len`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limit {
    /// In the index.
    pub until: u64,
    /// In the file.
    pub len: u64,
}

/// The limits of one index that count.
///
/// Invariant: both numbers grow from one limit to the next. A limit that concerns fewer frames and leaves more of them
/// has no effect.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits(Vec<Limit>);

impl Limits {
    /// Takes another one.
    pub fn add(&mut self, limit: Limit) {
        let Limit { until, len } = limit;
        let at = self.0.partition_point(|known| known.until < until);
        let next = self.0.get(at);
        if until == 0 || next.is_some_and(|next| next.len <= len) {
            return;
        }
        let has_same = next.is_some_and(|next| next.until == until);
        let first = self.0[..at].partition_point(|known| known.len < len);
        self.0.splice(first..at + usize::from(has_same), [limit]);
        let around = &self.0[first.saturating_sub(1)..self.0.len().min(first + 2)];
        debug_assert!(around.is_sorted_by(|one, next| one.until < next.until));
        debug_assert!(around.is_sorted_by(|one, next| one.len < next.len));
    }

    /// Where what the frame that begins at `frame` wrote ends.
    pub fn of(&self, frame: u64) -> u64 {
        let first = self.0.partition_point(|limit| limit.until <= frame);
        self.0.get(first).map_or(u64::MAX, |limit| limit.len)
    }

    /// Those that matter to frames from `first` to `last`.
    pub(crate) fn between(&self, first: u64, last: u64) -> &[Limit] {
        let from = self.0.partition_point(|limit| limit.until <= first);
        let to = self.0.partition_point(|limit| limit.until <= last);
        &self.0[from..self.0.len().min(to + 1)]
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Limit> + '_ {
        self.0.iter().copied()
    }

    /// Whether stored numbers are such.
    pub(crate) fn is_right(&self) -> bool {
        let grows = |pair: &[Limit]| pair[0].until < pair[1].until && pair[0].len < pair[1].len;
        let is_file = |limit: &Limit| limit.until > 0 && limit.len <= FILE_BYTES_MAX;
        self.0.windows(2).all(grows) && self.0.iter().all(is_file)
    }
}

/// A frame that made the file longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Growth {
    /// Where it begins in the index.
    pub frame: u64,
    /// Bytes that the file had afterwards.
    pub len: u64,
}

/// The growths of one index that count.
///
/// Invariant: each frame comes after, and has less, than the one before. What ended an earlier one that has no more ends a
/// later one too.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Growths(Vec<Growth>);

impl Growths {
    /// Takes another one.
    pub fn add(&mut self, growth: Growth) {
        let Growth { frame, len } = growth;
        let at = self.0.partition_point(|known| known.frame < frame);
        if self.0.get(at).is_some_and(|next| next.len >= len) {
            return;
        }
        let has_same = self.0.get(at).is_some_and(|next| next.frame == frame);
        let first = self.0[..at].partition_point(|known| known.len > len);
        self.0.splice(first..at + usize::from(has_same), [growth]);
        let around = &self.0[first.saturating_sub(1)..self.0.len().min(first + 2)];
        debug_assert!(around.is_sorted_by(|one, next| one.frame < next.frame));
        debug_assert!(around.is_sorted_by(|one, next| one.len > next.len));
    }

    /// How long they make the file.
    pub fn end(&self, limits: Option<&Limits>) -> u64 {
        let ends = self.0.iter().map(|growth| {
            let limit = limits.map_or(u64::MAX, |limits| limits.of(growth.frame));
            growth.len.min(limit)
        });
        ends.max().unwrap_or(0)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Growth> + '_ {
        self.0.iter().copied()
    }

    /// Whether stored numbers are such.
    pub(crate) fn is_right(&self) -> bool {
        let falls = |pair: &[Growth]| pair[0].frame < pair[1].frame && pair[0].len > pair[1].len;
        let is_file = |growth: &Growth| growth.len <= FILE_BYTES_MAX;
        self.0.windows(2).all(falls) && self.0.iter().all(is_file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_frame_ends_where_the_shortest_cut_that_had_seen_it_ends(
            cuts in proptest::collection::vec((0u64..12, 0u64..12), 0..10),
            growths in proptest::collection::vec((0u64..12, 0u64..12), 0..10),
        ) {
            let mut limits = Limits::default();
            for &(until, len) in &cuts {
                limits.add(Limit { until, len });
                prop_assert!(limits.is_right());
            }
            let of = |frame: u64| {
                let seen = cuts.iter().filter(|(until, _)| *until > frame);
                seen.map(|(_, len)| *len).min().unwrap_or(u64::MAX)
            };
            for frame in 0..13 {
                prop_assert_eq!(limits.of(frame), of(frame));
                for last in frame..13 {
                    let between = Limits(limits.between(frame, last).to_vec());
                    prop_assert!((frame..=last).all(|frame| between.of(frame) == of(frame)));
                }
            }
            let mut known = Growths::default();
            for &(frame, len) in &growths {
                known.add(Growth { frame, len });
                prop_assert!(known.is_right());
            }
            let ends = growths.iter().map(|(frame, len)| of(*frame).min(*len));
            prop_assert_eq!(known.end(Some(&limits)), ends.max().unwrap_or(0));
            let whole = growths.iter().map(|(_, len)| *len);
            prop_assert_eq!(known.end(None), whole.max().unwrap_or(0));
        }
    }
}
