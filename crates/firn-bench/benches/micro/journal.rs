//! Records into the journal of an arena, snapshots included.

use criterion::{Criterion, Throughput};
use firn_arena::journal::{Journal, Medium};
use firn_format::journal::frame_bytes;
use firn_format::record::{Ending, Identity, Record};

use super::room::{Copies, arena};

/// Files with pending data, which each snapshot writes again.
const BOUND: u64 = 100;

fn bind(file: u64) -> Record {
    let identity = Identity {
        dev: 1,
        ino: file,
        btime: Some((1_700_000_000, 5)),
    };
    let paths = vec![format!("run/step-{file:06}/rank-0000.ckpt").into_bytes()];
    Record::FileIdBegin {
        file,
        identity,
        paths,
        ending: Ending::Open,
    }
}

/// What a small file costs the journal: it is bound, and unbound when it is drained.
pub fn append(c: &mut Criterion) {
    let begin = bind(BOUND + 1);
    let end = Record::FileIdEnd { file: BOUND + 1 };
    let frames = [&begin, &end].map(|record| vec![7; frame_bytes(record.encode().len())]);
    let mut group = c.benchmark_group("journal bind and unbind");
    group.throughput(Throughput::Bytes(
        frames.iter().map(|frame| frame.len() as u64).sum(),
    ));
    let (_dir, arena) = arena();
    let mut copies = Copies::over(arena.journal_region().len());
    group.bench_function("memcpy", |b| {
        b.iter(|| frames.iter().for_each(|frame| copies.copy(frame)))
    });
    let mut journal = Journal::create(arena.journal_region());
    (1..=BOUND).for_each(|file| journal.append(&bind(file)).expect("room"));
    group.bench_function("journal", |b| {
        b.iter(|| {
            journal.append(&begin).expect("room");
            journal.append_end(&end).expect("room");
        });
    });
    group.finish();
}
