//! The connections of the control socket, and which one is closed when another one comes.
//!
//! Each connection has a *seat*. A seat is ordinary, or belongs to a reserve for short requests.
//!
//! Promises
//! * At most [`ORDINARY`] connections are served, and [`RESERVE`] more whose requests are those that [`is_short`]
//!   names.
//! * A connection is closed only while it is idle: no request of it is being answered, and it holds nothing. What it
//!   has sent since its last reply is not carried out.
//!
//! This module touches no socket. The caller gets the connection to close, and informs its client without holding the
//! lock.

use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use firn_protocol::{Holder, Request};
use firn_workers::Class;
use parking_lot::Mutex;

/// Limit of connections for all requests.
pub(super) const ORDINARY: usize = 64;
/// Limit of further connections for [`is_short`] requests, so that clients with all other connections cannot prevent a
/// status or an unmount.
pub(super) const RESERVE: usize = 8;
const _: () = assert!(ORDINARY + RESERVE <= Class::ControlClient.threads_max());
/// Limit of processes that a refusal names: those with the most connections.
const HOLDERS_MAX: usize = 8;

/// Returns whether a request may be answered on a seat of the reserve.
fn is_short(request: &Request) -> bool {
    matches!(
        request,
        Request::Hello | Request::Status | Request::Upgrade { .. } | Request::Unmount { .. }
    )
}

/// A connection that has lost its seat. The caller sends [`Reply::Closed`](firn_protocol::Reply::Closed) to its client
/// and closes it.
pub(super) type ClosedConnection = Arc<UnixStream>;

/// The connections of one socket.
#[derive(Default)]
pub(super) struct Seats(Mutex<SeatTable>);

/// What the lock of [`Seats`] protects.
#[derive(Default)]
struct SeatTable {
    /// The seats by connection number.
    seats: BTreeMap<u64, Seat>,
    /// Number of the connection that got a seat last.
    last_id: u64,
    /// Number of connections and requests since the start. It orders the connections by their last activity.
    last_activity: u64,
}

/// The seat of one connection.
struct Seat {
    stream: Arc<UnixStream>,
    /// Process number of the client; 0 if its PID namespace is not visible to firnd.
    pid: u32,
    kind: SeatKind,
    state: SeatState,
    /// Order of the connection's start or last request. The time of a reply does not count, because threads finish in
    /// any order.
    last_activity: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum SeatKind {
    /// For all requests.
    Ordinary,
    /// From the reserve, for [`is_short`] requests.
    Reserved,
}

impl SeatKind {
    /// Returns the number of seats of this kind.
    fn limit(self) -> usize {
        match self {
            Self::Ordinary => ORDINARY,
            Self::Reserved => RESERVE,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum SeatState {
    /// No request is under way, and nothing is held.
    Idle,
    /// A request is being answered.
    Busy,
    /// No request is under way, but the end of the connection would end what it holds.
    Holding,
}

/// Result of making room for a connection.
enum RoomMade {
    /// A seat is free.
    SeatIsFree,
    /// This connection has lost its seat.
    Closes(ClosedConnection),
    /// All seats are taken, and no connection is idle.
    None,
}

/// Whether a request that was read may be carried out.
pub(super) enum Admission {
    /// The request may be answered. The connection in the value, if any, must be closed for it.
    Admitted(Option<ClosedConnection>),
    /// The connection has lost its seat, so what was read from it counts as not sent.
    Lost,
    /// No ordinary seat is free. The value names the processes that have the seats.
    Refused(Vec<Holder>),
}

impl Seats {
    /// Returns the number of a new connection, and the connection to close for it. The error names the holders of all
    /// seats.
    pub(super) fn take(
        &self,
        stream: &Arc<UnixStream>,
        pid: u32,
    ) -> Result<(u64, Option<ClosedConnection>), Vec<Holder>> {
        let mut table = self.0.lock();
        let mut kind = SeatKind::Ordinary;
        let mut room = table.make_room(kind);
        if matches!(room, RoomMade::None) {
            kind = SeatKind::Reserved;
            room = table.make_room(kind);
        }
        let to_close = match room {
            RoomMade::SeatIsFree => None,
            RoomMade::Closes(idle) => Some(idle),
            RoomMade::None => return Err(table.holders()),
        };
        table.last_id += 1;
        let id = table.last_id;
        let last_activity = table.next_activity();
        table.seats.insert(
            id,
            Seat {
                stream: Arc::clone(stream),
                pid,
                kind,
                state: SeatState::Idle,
                last_activity,
            },
        );
        Ok((id, to_close))
    }

    /// Notes that a request of a connection was read, and returns whether it may be answered.
    ///
    /// A connection of the reserve that sends a long request gets an ordinary seat if one is free.
    pub(super) fn begin(&self, id: u64, request: &Request) -> Admission {
        let mut table = self.0.lock();
        let last_activity = table.next_activity();
        let Some(seat) = table.seats.get_mut(&id) else {
            return Admission::Lost;
        };
        seat.last_activity = last_activity;
        let mut to_close = None;
        let needs_ordinary_seat = seat.kind == SeatKind::Reserved && !is_short(request);
        if needs_ordinary_seat {
            match table.make_room(SeatKind::Ordinary) {
                RoomMade::SeatIsFree => {}
                RoomMade::Closes(idle) => to_close = Some(idle),
                RoomMade::None => return Admission::Refused(table.holders()),
            }
        }
        let seat = table
            .seats
            .get_mut(&id)
            .expect("only a reserved seat's own connection takes it away");
        if needs_ordinary_seat {
            seat.kind = SeatKind::Ordinary;
        }
        seat.state = SeatState::Busy;
        Admission::Admitted(to_close)
    }

    /// Notes that the reply was sent. `holds_state`: the end of the connection would end something.
    pub(super) fn end(&self, id: u64, holds_state: bool) {
        let mut table = self.0.lock();
        let state = if holds_state {
            SeatState::Holding
        } else {
            SeatState::Idle
        };
        if let Some(seat) = table.seats.get_mut(&id) {
            seat.state = state;
        }
    }

    /// Frees the seat of a connection that ended.
    pub(super) fn leave(&self, id: u64) {
        self.0.lock().seats.remove(&id);
    }
}

impl SeatTable {
    /// Returns the next number in the order of activity.
    fn next_activity(&mut self) -> u64 {
        self.last_activity += 1;
        self.last_activity
    }

    /// Makes room for one more connection: if all seats of this kind are taken, the connection that was idle longest
    /// loses its seat.
    fn make_room(&mut self, kind: SeatKind) -> RoomMade {
        let of_kind = || self.seats.iter().filter(|(_, seat)| seat.kind == kind);
        if of_kind().count() < kind.limit() {
            return RoomMade::SeatIsFree;
        }
        let idle = of_kind().filter(|(_, seat)| seat.state == SeatState::Idle);
        let longest_idle = idle.min_by_key(|(_, seat)| seat.last_activity);
        let id = longest_idle.map(|(id, _)| *id);
        match id.and_then(|id| self.seats.remove(&id)) {
            Some(seat) => RoomMade::Closes(seat.stream),
            None => RoomMade::None,
        }
    }

    /// Returns the processes with the most connections.
    fn holders(&self) -> Vec<Holder> {
        let mut counts = BTreeMap::<u32, u32>::new();
        for seat in self.seats.values() {
            *counts.entry(seat.pid).or_default() += 1;
        }
        let holder = |(pid, connections)| Holder { pid, connections };
        let mut holders: Vec<_> = counts.into_iter().map(holder).collect();
        holders.sort_by_key(|holder| std::cmp::Reverse(holder.connections));
        holders.truncate(HOLDERS_MAX);
        holders
    }
}

#[cfg(test)]
mod tests {
    use firn_protocol::HeldPolicy;

    use super::*;

    fn stream() -> Arc<UnixStream> {
        Arc::new(UnixStream::pair().unwrap().0)
    }

    fn wait() -> Request {
        Request::Files {
            path: "".into(),
            idle: false,
        }
    }

    /// Takes a seat and makes it busy, or lets it hold something.
    fn occupied(seats: &Seats, pid: u32, holds_state: bool) -> u64 {
        let (id, to_close) = seats.take(&stream(), pid).ok().unwrap();
        assert!(to_close.is_none());
        assert!(matches!(
            seats.begin(id, &wait()),
            Admission::Admitted(None)
        ));
        if holds_state {
            seats.end(id, true);
        }
        id
    }

    #[test]
    fn the_longest_idle_goes_and_what_it_sent_counts_as_not_sent() {
        let seats = Seats::default();
        let streams: Vec<_> = (0..ORDINARY).map(|_| stream()).collect();
        let ids: Vec<_> = streams
            .iter()
            .map(|stream| seats.take(stream, 1).ok().unwrap().0)
            .collect();
        // The first one was answered last.
        assert!(matches!(
            seats.begin(ids[0], &wait()),
            Admission::Admitted(None)
        ));
        seats.end(ids[0], false);
        for expected in streams[1..].iter().chain(&streams[..1]) {
            let (_, to_close) = seats.take(&stream(), 2).ok().unwrap();
            assert!(Arc::ptr_eq(&to_close.unwrap(), expected));
        }
        assert!(
            ids.iter()
                .all(|id| matches!(seats.begin(*id, &Request::Hello), Admission::Lost))
        );
    }

    #[test]
    fn what_is_busy_or_holds_something_stays_and_the_reserve_answers_what_is_short() {
        let seats = Seats::default();
        let ids: Vec<_> = (0..ORDINARY)
            .map(|n| occupied(&seats, 1 + n as u32 % 2, n % 3 == 0))
            .collect();
        let reserved = stream();
        let (id, to_close) = seats.take(&reserved, 7).ok().unwrap();
        assert!(to_close.is_none());
        for short in [
            Request::Hello,
            Request::Status,
            Request::Unmount {
                force: true,
                held: HeldPolicy::Drain,
            },
        ] {
            assert!(matches!(seats.begin(id, &short), Admission::Admitted(None)));
            seats.end(id, false);
        }
        let Admission::Refused(holders) = seats.begin(id, &wait()) else {
            panic!("no ordinary seat is free")
        };
        let holder = |pid, connections| Holder { pid, connections };
        assert_eq!(holders, [holder(1, 32), holder(2, 32), holder(7, 1)]);
        // Connections that send no request do not fill the reserve either.
        for _ in 1..RESERVE {
            assert!(seats.take(&stream(), 8).ok().unwrap().1.is_none());
        }
        assert!(matches!(seats.begin(id, &wait()), Admission::Refused(_)));
        let (_, to_close) = seats.take(&stream(), 9).ok().unwrap();
        assert!(
            !Arc::ptr_eq(&to_close.unwrap(), &reserved),
            "it was answered last"
        );
        // One ordinary seat becomes idle. It goes to a client that sends a request which the reserve does not serve.
        seats.end(ids[5], false);
        let Admission::Admitted(Some(_)) = seats.begin(id, &wait()) else {
            panic!("the idle one goes")
        };
        assert!(matches!(seats.begin(ids[5], &wait()), Admission::Lost));
    }

    #[test]
    fn one_too_many_is_refused_and_a_seat_that_is_left_is_free() {
        let seats = Seats::default();
        let ids: Vec<_> = (0..ORDINARY).map(|_| occupied(&seats, 1, true)).collect();
        for _ in 0..RESERVE {
            let (id, _) = seats.take(&stream(), 2).ok().unwrap();
            assert!(matches!(
                seats.begin(id, &Request::Status),
                Admission::Admitted(None)
            ));
        }
        let holders = seats.take(&stream(), 3).unwrap_err();
        assert_eq!(
            holders.iter().map(|holder| holder.connections).sum::<u32>(),
            72
        );
        seats.leave(ids[0]);
        assert!(seats.take(&stream(), 3).ok().unwrap().1.is_none());
    }
}
