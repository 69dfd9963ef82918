//! Protocol: any line is refused or read; what is read is written as one line that reads the same, and so is every
//! path, whatever its bytes.
#![no_main]

use arbitrary::{Arbitrary, Unstructured};
use firn_format::durability::DurabilityLevel;
use firn_format::record::Ending;
use firn_protocol::path::BytePath;
use firn_protocol::record::RunRecord;
use firn_protocol::{
    ChunkList, ChunkPiece, DataRegion, ErrorStatus, FileStatus, HeldPolicy, Holder, LaneStatus,
    Owner, Place, Reply, Request, SpillRegion, Status,
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(request) = serde_json::from_slice::<Request>(bytes) {
        returns_request(&request);
    }
    if let Ok(reply) = serde_json::from_slice::<Reply>(bytes) {
        returns_reply(&reply);
    }
    if let Ok(record) = RunRecord::parse(bytes) {
        let written = serde_json::to_vec(&record).expect("a record can be written");
        assert!(RunRecord::parse(&written).is_ok(), "and read again");
        let _ = record.total();
    }
    let path = BytePath::from(bytes);
    let written = serde_json::to_vec(&path).expect("a path can be written");
    assert_eq!(
        serde_json::from_slice::<BytePath>(&written).expect("it can be read"),
        path
    );
    let mut u = Unstructured::new(bytes);
    if let Ok(request) = request(&mut u) {
        returns_request(&request);
    }
    if let Ok(reply) = reply(&mut u) {
        returns_reply(&reply);
    }
});

fn returns_request(request: &Request) {
    let line = serde_json::to_string(request).expect("a request can be written");
    assert!(!line.contains('\n'), "one line: {line}");
    assert_eq!(
        &serde_json::from_str::<Request>(&line).expect("it can be read"),
        request
    );
}

fn returns_reply(reply: &Reply) {
    let line = serde_json::to_string(reply).expect("a reply can be written");
    assert!(!line.contains('\n'), "one line: {line}");
    assert_eq!(
        &serde_json::from_str::<Reply>(&line).expect("it can be read"),
        reply
    );
}

fn request(u: &mut Unstructured) -> arbitrary::Result<Request> {
    Ok(match u.int_in_range(0..=16)? {
        0 => Request::Hello,
        1 => Request::Status,
        2 => {
            let until = level(u)?;
            Request::Wait {
                until,
                timeout_ms: Arbitrary::arbitrary(u)?,
                path: path(u)?,
            }
        }
        3 => Request::Drain { path: path(u)? },
        4 => Request::Files {
            path: path(u)?,
            idle: u.arbitrary()?,
        },
        5 => Request::Flatten { path: path(u)? },
        6 => Request::ClearErrors,
        7 => Request::Region,
        8 => Request::Chunks { path: path(u)? },
        9 => Request::CheckChunks {
            list: Arbitrary::arbitrary(u)?,
        },
        10 => Request::ReleaseChunks {
            list: Arbitrary::arbitrary(u)?,
        },
        11 => Request::Evict { path: path(u)? },
        12 => Request::Pin {
            path: path(u)?,
            pinned: Arbitrary::arbitrary(u)?,
        },
        13 => Request::Begin {
            path: path(u)?,
            owner: owner(u)?,
            create: Arbitrary::arbitrary(u)?,
        },
        14 => Request::Place { path: path(u)? },
        15 => Request::ReportPull {
            files: Arbitrary::arbitrary(u)?,
            bytes: Arbitrary::arbitrary(u)?,
        },
        _ => Request::Unmount {
            force: Arbitrary::arbitrary(u)?,
            held: *u.choose(&[HeldPolicy::Drain, HeldPolicy::Keep, HeldPolicy::Discard])?,
        },
    })
}

fn owner(u: &mut Unstructured) -> arbitrary::Result<Owner> {
    Ok(match u.int_in_range(0..=2)? {
        0 => Owner::None,
        1 => Owner::Connection,
        _ => Owner::Process {
            pid: Arbitrary::arbitrary(u)?,
            start_ticks: Arbitrary::arbitrary(u)?,
        },
    })
}

fn reply(u: &mut Unstructured) -> arbitrary::Result<Reply> {
    Ok(match u.int_in_range(0..=12)? {
        0 => {
            let (protocol, version, pid, incarnation) = Arbitrary::arbitrary(u)?;
            Reply::Hello {
                protocol,
                version,
                pid,
                incarnation,
            }
        }
        1 => Reply::Status(Box::new(status(u)?)),
        2 => Reply::Files {
            files: (0..u.int_in_range(0..=3)?)
                .map(|_| file(u))
                .collect::<Result<_, _>>()?,
        },
        3 => Reply::Done,
        4 => {
            let (bytes_left, files_left, phase) = Arbitrary::arbitrary(u)?;
            Reply::Progress {
                bytes_left,
                files_left,
                phase,
            }
        }
        5 => Reply::Closed,
        6 => Reply::Region(region(u)?),
        7 => {
            let (list, bytes, changes) = Arbitrary::arbitrary(u)?;
            let pieces = (0..u.int_in_range(0..=3)?)
                .map(|_| piece(u))
                .collect::<Result<_, _>>()?;
            Reply::Chunks(ChunkList {
                list,
                bytes,
                changes,
                pieces,
            })
        }
        8 => Reply::ChunksChecked {
            changed: Arbitrary::arbitrary(u)?,
        },
        9 => {
            let (freed_bytes, held_bytes) = Arbitrary::arbitrary(u)?;
            Reply::Evicted {
                freed_bytes,
                held_bytes,
            }
        }
        10 => {
            let (files, bytes) = Arbitrary::arbitrary(u)?;
            Reply::Pinned { files, bytes }
        }
        11 => {
            let (connections, holders): (_, Vec<(u32, u32)>) = Arbitrary::arbitrary(u)?;
            let holder = |(pid, connections)| Holder { pid, connections };
            Reply::Busy {
                connections,
                holders: holders.into_iter().map(holder).collect(),
            }
        }
        _ => {
            let (errno, message) = Arbitrary::arbitrary(u)?;
            Reply::Error { errno, message }
        }
    })
}

/// One field of each type; the others are the same to serde.
fn status(u: &mut Unstructured) -> arbitrary::Result<Status> {
    let lane = LaneStatus {
        path: path(u)?,
        writers: Arbitrary::arbitrary(u)?,
        retry_seconds: Some(seconds(u)?),
        ..LaneStatus::default()
    };
    let (errno, message, pending) = Arbitrary::arbitrary(u)?;
    let error = ErrorStatus {
        errno,
        message,
        pending,
        age_seconds: seconds(u)?,
        ..ErrorStatus::default()
    };
    let (pid, epoch, file_size_limit_bytes, options) = Arbitrary::arbitrary(u)?;
    let backing = path(u)?;
    let lanes = vec![lane];
    let errors = vec![error];
    let uptime_seconds = seconds(u)?;
    Ok(Status {
        backing,
        pid,
        epoch,
        file_size_limit_bytes,
        options,
        uptime_seconds,
        lanes,
        errors,
        ..Status::default()
    })
}

/// JSON has no infinity and no NaN, and firnd makes none.
fn seconds(u: &mut Unstructured) -> arbitrary::Result<f64> {
    Ok(Some(f64::arbitrary(u)?)
        .filter(|s| s.is_finite())
        .unwrap_or(0.0))
}

fn file(u: &mut Unstructured) -> arbitrary::Result<FileStatus> {
    let state = level(u)?;
    let (held_bytes, held_end, open, in_transaction) = Arbitrary::arbitrary(u)?;
    let path = path(u)?;
    let ending = *u.choose(&[Ending::Open, Ending::Closed, Ending::Cut])?;
    let changes = u64::arbitrary(u)?;
    Ok(FileStatus {
        path,
        state,
        held_bytes,
        held_end,
        open,
        ending,
        changes,
        in_transaction,
    })
}

fn region(u: &mut Unstructured) -> arbitrary::Result<DataRegion> {
    let (uuid, offset, bytes, page_bytes, chunk_bytes) = Arbitrary::arbitrary(u)?;
    let spill: Option<(Vec<u8>, u64, u64)> = Arbitrary::arbitrary(u)?;
    let spill = spill.map(|(path, offset, bytes)| SpillRegion {
        path: path.into(),
        offset,
        bytes,
    });
    let path = path(u)?;
    Ok(DataRegion {
        path,
        uuid,
        offset,
        bytes,
        page_bytes,
        chunk_bytes,
        spill,
    })
}

/// Any bytes.
fn path(u: &mut Unstructured) -> arbitrary::Result<BytePath> {
    Ok(Vec::<u8>::arbitrary(u)?.into())
}

fn piece(u: &mut Unstructured) -> arbitrary::Result<ChunkPiece> {
    let place = *u.choose(&[Place::Memory, Place::Spill, Place::Backing, Place::Hole])?;
    let (offset, bytes, at, chunk) = Arbitrary::arbitrary(u)?;
    Ok(ChunkPiece {
        offset,
        bytes,
        place,
        at,
        chunk,
    })
}

fn level(u: &mut Unstructured) -> arbitrary::Result<DurabilityLevel> {
    Ok(*u.choose(&[
        DurabilityLevel::Held,
        DurabilityLevel::Spilled,
        DurabilityLevel::Partnered,
        DurabilityLevel::Logged,
        DurabilityLevel::Drained,
        DurabilityLevel::Durable,
    ])?)
}
