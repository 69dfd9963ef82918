//! The resolver compared with a reference: the same changes are made in their order to a file in memory, each up to the
//! shortest length of all cuts that had seen it.

use std::collections::BTreeMap;

use firn_log::frame::{CHECKED_BYTES, Change, Cut, DecodedFrame, Frame, Written};
use firn_log::names::Writer;
use firn_log::resolve::{ChangeKey, Resolver, Source, WriterId};
use firn_log::run::{Piece, Run, find_runs};
use proptest::prelude::*;

const FILE_BYTES: u64 = 400;

const HOSTS: usize = 3;

fn writer(host: usize) -> Writer {
    Writer::new(["a", "b", "c"][host], 1)
}

fn id(host: usize) -> WriterId {
    writer(host).id()
}

fn host_of(id: WriterId) -> usize {
    (0..HOSTS)
        .find(|host| self::id(*host) == id)
        .expect("one of them")
}

/// One step of one host.
#[derive(Clone, Debug)]
enum Step {
    Write(Vec<Piece>),
    Cut(u64),
    Grow(u64),
    Zero(Piece),
    /// The host opens or syncs the file: its later changes are newer than all earlier ones.
    Sync,
    /// The host reads what another host has appended.
    Read(usize),
}

fn any_step() -> impl Strategy<Value = (usize, Step)> {
    let piece = (0..FILE_BYTES, 1u64..40).prop_map(|(offset, len)| Piece { offset, len });
    let strided =
        (0..100u64, 1u64..12, 0u64..12, 1u64..10).prop_map(|(offset, len, gap, count)| {
            let pieces = (0..count).map(|number| Piece {
                offset: offset + (len + gap) * number,
                len,
            });
            pieces.collect::<Vec<_>>()
        });
    let step = prop_oneof![
        4 => proptest::collection::vec(piece.clone(), 1..4).prop_map(disjoint).prop_map(Step::Write),
        4 => strided.prop_map(Step::Write),
        2 => (0..FILE_BYTES + 100).prop_map(Step::Cut),
        1 => (0..FILE_BYTES + 100).prop_map(Step::Grow),
        1 => piece.clone().prop_map(Step::Zero),
        1 => Just(Step::Sync),
        2 => (0..HOSTS).prop_map(Step::Read),
    ];
    (0..HOSTS, step)
}

/// Removes overlapping pieces, because the pieces of one write do not overlap.
fn disjoint(mut pieces: Vec<Piece>) -> Vec<Piece> {
    pieces.sort_by_key(|piece| piece.offset);
    let mut end = 0;
    pieces.retain(|piece| {
        let is_free = piece.offset >= end;
        if is_free {
            end = piece.offset + piece.len;
        }
        is_free
    });
    pieces
}

/// One host with its log, its index and its epoch.
#[derive(Default)]
struct Host {
    log: Vec<u8>,
    index: Vec<u8>,
    frames: u64,
    epoch: u64,
    /// Number of frames of each host that it has read.
    seen: [u64; HOSTS],
}

impl Host {
    fn cut(&self, host: usize, len: u64) -> Change {
        let others = (0..HOSTS).filter(|other| *other != host && self.seen[*other] > 0);
        let seen: BTreeMap<Writer, u64> = others
            .map(|other| (writer(other), self.seen[other]))
            .collect();
        Change::Cut(Cut { len, seen })
    }

    fn append(&mut self, change: Change) {
        let frame = Frame {
            epoch: self.epoch,
            synced: 0,
            change,
        };
        frame.encode(&mut self.index);
        self.frames += 1;
    }

    fn write(&mut self, pieces: &[Piece], mark: u8) {
        let position = self.log.len() as u64;
        let bytes: u64 = pieces.iter().map(|piece| piece.len).sum();
        self.log
            .extend((0..bytes).map(|at| mark.wrapping_add(at as u8)));
        let checksums = self.log[position as usize..].chunks(CHECKED_BYTES as usize);
        let checksums = checksums.map(crc32c::crc32c).collect();
        self.append(Change::Written(Written {
            log: 0,
            position,
            checksums,
            runs: find_runs(pieces.iter().copied()),
        }));
    }
}

/// Returns the length up to which a cut leaves a change: all of it if the cut had not seen it.
fn limit_of(cut: &(ChangeKey, Change, Vec<u8>), key: ChangeKey) -> u64 {
    let (cut_key, Change::Cut(cut), _) = cut else {
        return u64::MAX;
    };
    let seen = if cut_key.writer == key.writer {
        cut_key.frame
    } else {
        *cut.seen.get(&writer(host_of(key.writer))).unwrap_or(&0)
    };
    if key.frame < seen { cut.len } else { u64::MAX }
}

/// Returns the expected bytes: a vector with all changes in the order of their keys, except those that cuts remove.
fn expected(base: &[u8], mut changes: Vec<(ChangeKey, Change, Vec<u8>)>) -> Vec<u8> {
    changes.sort_by_key(|(key, ..)| *key);
    let mut file = base.to_vec();
    for (_, change, _) in &changes {
        if let Change::Cut(cut) = change {
            file.truncate(cut.len as usize);
        }
    }
    let put = |file: &mut Vec<u8>, offset: u64, byte: u8| {
        if file.len() as u64 <= offset {
            file.resize(offset as usize + 1, 0);
        }
        file[offset as usize] = byte;
    };
    for (key, change, bytes) in &changes {
        let limits = changes.iter().map(|cut| limit_of(cut, *key));
        let limit = limits.min().unwrap_or(u64::MAX);
        let mut end = 0;
        match change {
            Change::Synced | Change::Cut(_) => {}
            Change::Grown(len) => end = *len,
            Change::Zeroed(Piece { offset, len }) => {
                let bytes = file.iter_mut().take(limit as usize);
                let bytes = bytes.skip(*offset as usize).take(*len as usize);
                bytes.for_each(|byte| *byte = 0);
            }
            Change::Written(written) => {
                let pieces = written.runs.iter().flat_map(Run::pieces);
                let offsets = pieces.flat_map(|piece| piece.offset..piece.offset + piece.len);
                for (offset, byte) in offsets.zip(bytes) {
                    end = end.max(offset + 1);
                    if offset < limit {
                        put(&mut file, offset, *byte);
                    }
                }
            }
        }
        if file.len() < end.min(limit) as usize {
            file.resize(end.min(limit) as usize, 0);
        }
    }
    file
}

fn read(resolver: &Resolver, hosts: &[Host], base: &[u8], range: std::ops::Range<u64>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for segment in resolver.find(range) {
        let from = segment.file.start as usize;
        let to = segment.file.end as usize;
        match segment.source {
            Source::Plain => bytes.extend(&base[from..to]),
            Source::Hole | Source::Zeros => bytes.resize(bytes.len() + to - from, 0),
            Source::Log { key, position, .. } => {
                let log = &hosts[host_of(key.writer)].log;
                bytes.extend(&log[position as usize..][..to - from]);
            }
        }
    }
    bytes
}

proptest! {
    #[test]
    fn the_index_gives_the_bytes_of_all_changes_in_order(
        steps in proptest::collection::vec(any_step(), 0..40),
        base_len in 0..FILE_BYTES,
        seed in any::<u64>(),
        from in 0..FILE_BYTES,
        len in 0..FILE_BYTES,
    ) {
        let base: Vec<u8> = (0..base_len).map(|at| at as u8 | 0x80).collect();
        let mut hosts: Vec<Host> = (0..HOSTS).map(|_| Host::default()).collect();
        let mut changes = Vec::new();
        for (number, (host, step)) in steps.into_iter().enumerate() {
            let newest = hosts.iter().filter(|host| host.frames > 0).map(|host| host.epoch).max();
            let frames: Vec<u64> = hosts.iter().map(|host| host.frames).collect();
            let writer = id(host);
            let number_of_host = host;
            let host = &mut hosts[host];
            let key = ChangeKey { epoch: host.epoch, writer, frame: host.frames };
            match step {
                Step::Sync => {
                    host.epoch = host.epoch.max(newest.map_or(0, |newest| newest + 1));
                    host.seen.copy_from_slice(&frames);
                    continue;
                }
                Step::Read(other) => {
                    host.seen[other] = frames[other];
                    continue;
                }
                Step::Cut(len) => {
                    let cut = host.cut(number_of_host, len);
                    host.append(cut.clone());
                    changes.push((key, cut, Vec::new()));
                }
                Step::Grow(len) => {
                    host.append(Change::Grown(len));
                    changes.push((key, Change::Grown(len), Vec::new()));
                }
                Step::Zero(piece) => {
                    host.append(Change::Zeroed(piece));
                    changes.push((key, Change::Zeroed(piece), Vec::new()));
                }
                Step::Write(pieces) => {
                    let start = host.log.len();
                    host.write(&pieces, (number * 37 + 1) as u8);
                    let runs = find_runs(pieces);
                    let change = Change::Written(Written { log: 0, position: 0, checksums: vec![], runs });
                    changes.push((key, change, host.log[start..].to_vec()));
                }
            }
        }

        let mut resolver = Resolver::new(base_len);
        let mut frames = Vec::new();
        for (writer, host) in hosts.iter().enumerate() {
            let mut rest = host.index.as_slice();
            let mut number = 0;
            while let DecodedFrame::Complete(frame, bytes) = Frame::decode(rest) {
                frames.push((id(writer), number, frame));
                rest = &rest[bytes..];
                number += 1;
            }
            prop_assert!(rest.is_empty());
        }
        // The resolver gets the frames in any order.
        let count = frames.len().max(1);
        frames.sort_by_key(|(writer, number, _)| (seed.wrapping_mul(2 * (writer.host % 3 + 3 * number) + 1)) % count as u64);
        for (writer, number, frame) in frames {
            resolver.add(writer, number, frame);
        }

        let expected = expected(&base, changes);
        prop_assert_eq!(resolver.len(), expected.len() as u64);
        prop_assert_eq!(read(&resolver, &hosts, &base, 0..u64::MAX), expected.clone());
        let range = (from as usize).min(expected.len())..((from + len) as usize).min(expected.len());
        prop_assert_eq!(read(&resolver, &hosts, &base, from..from + len), &expected[range]);
    }
}

#[test]
fn what_is_written_after_a_sync_is_newer_whatever_the_hosts_are_called() {
    let write = |epoch, byte_position| Frame {
        epoch,
        synced: 0,
        change: Change::Written(Written {
            log: 0,
            position: byte_position,
            checksums: vec![0],
            runs: find_runs([Piece { offset: 0, len: 10 }]),
        }),
    };
    // Host 1 writes first. Host 0 syncs after that, and writes too.
    let mut resolver = Resolver::new(0);
    resolver.add(id(0), 0, write(2, 70));
    resolver.add(id(1), 0, write(1, 50));
    let found = resolver.find(0..10);
    assert_eq!(found.len(), 1);
    assert!(matches!(found[0].source, Source::Log { position: 70, .. }));
    assert_eq!(resolver.last_epoch(), Some(2));
}
