//! Which bytes a truncation of a file hides, if several hosts write the file and each lists its changes in an index of
//! its own.
//!
//! Terms
//! * Index: the list of the changes that one host made. A *frame* is one of its entries.
//! * Cut: a change that shortens the file. It hides only changes that its host had seen.
//! * [`Limit`]: the effect of a cut on one index. The frames that begin before a position in the index count only up to
//!   the length of the cut.
//! * [`Growth`]: a change that makes the file longer and hides nothing. A later cut hides it as it hides bytes.
//!
//! Rule: a frame counts up to the shortest length of all cuts that had seen it. If no cut had seen it, all of it
//! counts. So the order of cuts does not matter, and neither do epochs.
//!
//! Example: host A has written frames at the positions 0, 100 and 200 of its index. Host B, which has read A's index up
//! to position 200, cuts the file to 50 bytes. In A's index this is the limit `until: 200, len: 50`: the frames at 0
//! and 100 count only up to offset 50 of the file. B had not seen the frame at 200, so all of that frame counts.

use serde::{Deserialize, Serialize};

use crate::run::FILE_BYTES_MAX;

/// Frames of an index that begin before `until` count only up to `len` in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limit {
    /// Position in the index at which the frames begin that the cut's host had not seen.
    pub until: u64,
    /// Length of the file after the cut.
    pub len: u64,
}

/// The limits of one index.
///
/// Invariant: `until` and `len` both grow from one limit to the next. A limit is redundant, and left out, if another
/// one hides at least as much of all its frames: it has the same or a larger `until`, and the same or a smaller `len`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitList(Vec<Limit>);

impl LimitList {
    /// Adds the effect of a cut (a change that shortens the file) on one index, the list of a host's changes: the
    /// frames (entries) of the index that begin before `until` count only up to the length `len` from now on.
    ///
    /// Removes limits that become redundant, so `until` and `len` still both grow. Example: the limits (until 10, len
    /// 5) and (20, 9) are known. Adding (15, 3) removes (10, 5), because the new one hides more of the same frames.
    pub fn add(&mut self, limit: Limit) {
        let Limit { until, len } = limit;
        let end = self.0.partition_point(|known| known.until < until);
        // The following limit applies to all frames of the new one. If its length is not greater, the new one is
        // redundant.
        let following = self.0.get(end);
        let has_no_effect = until == 0 || following.is_some_and(|following| following.len <= len);
        if has_no_effect {
            return;
        }
        let replaces_following = following.is_some_and(|following| following.until == until);
        // Earlier limits apply to fewer frames. Those with no smaller length are redundant now.
        let start = self.0[..end].partition_point(|known| known.len < len);
        self.0
            .splice(start..end + usize::from(replaces_following), [limit]);
        let neighbours = &self.0[start.saturating_sub(1)..self.0.len().min(start + 2)];
        debug_assert!(neighbours.is_sorted_by(|left, right| left.until < right.until));
        debug_assert!(neighbours.is_sorted_by(|left, right| left.len < right.len));
    }

    /// Returns the length of the file up to which the frame at `frame` counts; `u64::MAX` if no cut hides any of it.
    pub fn len_limit_at(&self, frame: u64) -> u64 {
        // The first limit that applies to the frame has the smallest length of all that do.
        let first_applying = self.0.partition_point(|limit| limit.until <= frame);
        self.0
            .get(first_applying)
            .map_or(u64::MAX, |limit| limit.len)
    }

    /// Returns the limits that apply to frames that begin from `first` to `last`.
    pub(crate) fn between(&self, first: u64, last: u64) -> &[Limit] {
        let start = self.0.partition_point(|limit| limit.until <= first);
        let last_applying = self.0.partition_point(|limit| limit.until <= last);
        &self.0[start..self.0.len().min(last_applying + 1)]
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Limit> + '_ {
        self.0.iter().copied()
    }

    /// Returns whether decoded limits meet the invariant and the bounds of a file.
    pub(crate) fn is_valid(&self) -> bool {
        let grows = |pair: &[Limit]| pair[0].until < pair[1].until && pair[0].len < pair[1].len;
        let is_file = |limit: &Limit| limit.until > 0 && limit.len <= FILE_BYTES_MAX;
        self.0.windows(2).all(grows) && self.0.iter().all(is_file)
    }
}

/// A change that made the file longer without writing bytes, as ftruncate(2) does with a greater length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Growth {
    /// Position of its frame in the index.
    pub frame: u64,
    /// Length of the file after the growth.
    pub len: u64,
}

/// The growths of one index.
///
/// Invariant: from one growth to the next, `frame` grows and `len` shrinks. A growth is redundant, and left out, if a
/// later one has at least its length: each cut that hides the later one hides the earlier one too.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrowthList(Vec<Growth>);

impl GrowthList {
    /// Adds a growth: a change at position `frame` of a host's index that made the file `len` bytes long without
    /// writing bytes. A later cut hides it as it hides bytes.
    ///
    /// Removes growths that become redundant, so `frame` still grows and `len` shrinks. Example: adding (frame 30, len
    /// 8) removes (20, 7), because a cut that hides the new growth hides the old one too.
    pub fn add(&mut self, growth: Growth) {
        let Growth { frame, len } = growth;
        let end = self.0.partition_point(|known| known.frame < frame);
        // Each cut that hides the following growth hides the new one too. If the following one has at least the same
        // length, the new one is redundant.
        let following = self.0.get(end);
        let has_no_effect = following.is_some_and(|following| following.len >= len);
        if has_no_effect {
            return;
        }
        let replaces_following = following.is_some_and(|following| following.frame == frame);
        // Each cut that hides the new growth hides the earlier ones too. Those of no greater length are redundant now.
        let start = self.0[..end].partition_point(|known| known.len > len);
        self.0
            .splice(start..end + usize::from(replaces_following), [growth]);
        let neighbours = &self.0[start.saturating_sub(1)..self.0.len().min(start + 2)];
        debug_assert!(neighbours.is_sorted_by(|left, right| left.frame < right.frame));
        debug_assert!(neighbours.is_sorted_by(|left, right| left.len > right.len));
    }

    /// Returns how long the growths make the file, after `limits` of the same index.
    pub fn end(&self, limits: Option<&LimitList>) -> u64 {
        let mut end = 0;
        for growth in &self.0 {
            let limit = limits.map_or(u64::MAX, |limits| limits.len_limit_at(growth.frame));
            end = end.max(growth.len.min(limit));
        }
        end
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Growth> + '_ {
        self.0.iter().copied()
    }

    /// Returns whether decoded growths meet the invariant and the bounds of a file.
    pub(crate) fn is_valid(&self) -> bool {
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
            let mut limits = LimitList::default();
            for &(until, len) in &cuts {
                limits.add(Limit { until, len });
                prop_assert!(limits.is_valid());
            }
                    let expected = |frame: u64| {
                        let applying = cuts.iter().filter(|(until, _)| *until > frame);
                        applying.map(|(_, len)| *len).min().unwrap_or(u64::MAX)
            };
            for frame in 0..13 {
                            prop_assert_eq!(limits.len_limit_at(frame), expected(frame));
                for last in frame..13 {
                    let between = LimitList(limits.between(frame, last).to_vec());
                                    prop_assert!((frame..=last).all(|frame| between.len_limit_at(frame) == expected(frame)));
                }
            }
            let mut known = GrowthList::default();
            for &(frame, len) in &growths {
                known.add(Growth { frame, len });
                prop_assert!(known.is_valid());
            }
                    let ends = growths.iter().map(|(frame, len)| expected(*frame).min(*len));
            prop_assert_eq!(known.end(Some(&limits)), ends.max().unwrap_or(0));
            let whole = growths.iter().map(|(_, len)| *len);
            prop_assert_eq!(known.end(None), whole.max().unwrap_or(0));
        }
    }
}
