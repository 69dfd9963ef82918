//! Several lanes served by one set of threads: a lane that hangs stops no other lane.

use crate::common;

use common::host::{Host, LIMIT, until};
use firn_backing::LaneIndex;
use firn_drain::IoThreads;
use firn_sim::SimBacking;

const LANES: u16 = 2;

fn start(threads: IoThreads) -> (SimBacking, Host<SimBacking>) {
    let backing = SimBacking::new();
    backing.set_lanes(LANES);
    let host = Host::start(backing.clone(), threads, None);
    (backing, host)
}

fn writers(host: &Host<SimBacking>, lane: LaneIndex) -> usize {
    host.engine.figures().lanes[lane.index()].writers as usize
}

/// Proves S-order-4.
#[test]
fn a_lane_that_hangs_leaves_the_others_a_thread() {
    let (backing, host) = start(IoThreads::new(3));
    let hung_lane = LaneIndex::new(1);
    let hung: Vec<_> = ["one", "two"]
        .map(|name| {
            let hang = backing.hang("write_at");
            let (handle, told) = host.write_awaited_in(name, hung_lane);
            hang.await_call();
            (hang, handle, told)
        })
        .into();
    let (behind, told_behind) = host.write_awaited_in("behind", hung_lane);
    for number in 0..3 {
        let (handle, told) = host.write_awaited_in(&format!("other_{number}"), LaneIndex::FIRST);
        assert!(told.recv_timeout(LIMIT).expect("drained"));
        host.engine.release(handle);
    }
    assert_eq!(writers(&host, hung_lane), 2);
    assert!(told_behind.try_recv().is_err(), "its lane has no thread");
    // Additional threads replace the hanging ones.
    until("the lane goes on", || {
        host.pool.replace_hung();
        told_behind.try_recv() == Ok(true)
    });
    host.engine.release(behind);
    for (hang, handle, told) in hung {
        assert!(told.try_recv().is_err(), "it still hangs");
        hang.release();
        assert!(told.recv_timeout(LIMIT).expect("drained"));
        host.engine.release(handle);
    }
    host.end();
}

/// Proves S-order-4.
#[test]
fn a_lane_has_no_more_writes_than_lane_writers() {
    let (backing, host) = start(IoThreads {
        lane_writers_max: 1,
        ..IoThreads::new(4)
    });
    let lane = LaneIndex::FIRST;
    let hang = backing.hang("write_at");
    let (first, told_first) = host.write_awaited_in("first", lane);
    hang.await_call();
    let (second, told_second) = host.write_awaited_in("second", lane);
    let (other, told) = host.write_awaited_in("other", LaneIndex::new(1));
    assert!(told.recv_timeout(LIMIT).expect("drained"));
    assert_eq!(writers(&host, lane), 1);
    assert!(told_second.try_recv().is_err());
    hang.release();
    assert!(told_first.recv_timeout(LIMIT).expect("drained"));
    assert!(told_second.recv_timeout(LIMIT).expect("drained"));
    for handle in [first, second, other] {
        host.engine.release(handle);
    }
    host.end();
}
