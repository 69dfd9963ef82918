//! The connections of the control socket, and which one is closed when another one comes.
//!
//! Each connection has a *slot*. A slot is ordinary, or belongs to a reserve for short requests.
//!
//! Promises
//! * At most [`ORDINARY_SLOTS`] connections are served, and [`RESERVED_SLOTS`] more for the requests that [`is_short`]
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
pub(super) const ORDINARY_SLOTS: usize = 64;
/// Limit of further connections for [`is_short`] requests, so that clients with all other connections cannot prevent a
/// status or an unmount.
pub(super) const RESERVED_SLOTS: usize = 8;
const _: () = assert!(ORDINARY_SLOTS + RESERVED_SLOTS <= Class::ControlClient.threads_max());
/// Limit of processes that a refusal names: those with the most connections.
const HOLDERS_MAX: usize = 8;

/// Returns whether a request may be answered on a slot of the reserve.
fn is_short(request: &Request) -> bool {
    matches!(
        request,
        Request::Hello | Request::Status | Request::Upgrade { .. } | Request::Unmount { .. }
    )
}

/// A connection that has lost its slot. The caller sends [`Reply::Closed`](firn_protocol::Reply::Closed) to its client
/// and closes it.
pub(super) type ClosedConnection = Arc<UnixStream>;

/// The connections of one socket.
#[derive(Default)]
pub(super) struct ConnectionSlots(Mutex<SlotTable>);

/// What the lock of [`ConnectionSlots`] protects.
#[derive(Default)]
struct SlotTable {
    /// The slots by connection number.
    slots: BTreeMap<u64, Slot>,
    /// Number of the connection that got a slot last.
    last_id: u64,
    /// Number of connections and requests since the start. It orders the connections by their last activity.
    last_activity: u64,
}

/// The slot of one connection.
struct Slot {
    stream: Arc<UnixStream>,
    /// Process number of the client; 0 if its PID namespace is not visible to firnd.
    pid: u32,
    kind: SlotKind,
    state: SlotState,
    /// Order of the connection's start or last request. The time of a reply does not count, because threads finish in
    /// any order.
    last_activity: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum SlotKind {
    /// For all requests.
    Ordinary,
    /// From the reserve, for [`is_short`] requests.
    Reserved,
}

impl SlotKind {
    /// Returns the number of slots of this kind.
    fn limit(self) -> usize {
        match self {
            Self::Ordinary => ORDINARY_SLOTS,
            Self::Reserved => RESERVED_SLOTS,
        }
    }
}

/// What the connection of a slot does.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum SlotState {
    /// No request is under way, and nothing is held.
    Idle,
    /// A request is being answered.
    Busy,
    /// No request is under way, but the end of the connection would end what it holds.
    Holding,
}

/// Result of [`SlotTable::free_slot`].
enum FreedSlot {
    /// A slot was free already.
    WasFree,
    /// This idle connection has lost its slot.
    TakenFrom(ClosedConnection),
    /// All slots are in use, and no connection is idle.
    None,
}

/// The slot of a new connection.
#[derive(Debug)]
pub(super) struct AcquiredSlot {
    /// Number of the connection.
    pub(super) id: u64,
    /// The connection that must be closed for it, if there is one.
    pub(super) to_close: Option<ClosedConnection>,
}

/// Whether a request that was read may be carried out.
pub(super) enum Admission {
    /// The request may be answered. The connection in the value, if any, must be closed for it.
    Admitted(Option<ClosedConnection>),
    /// The connection has lost its slot, so what was read from it counts as not sent.
    Lost,
    /// No ordinary slot is free. The value names the processes that have the slots.
    Refused(Vec<Holder>),
}

impl ConnectionSlots {
    /// Gives a new connection a slot: an ordinary one, or else one of the reserve, which is for short requests. If all
    /// are used, the longest idle connection loses its slot, and the caller closes it. The error names the processes
    /// that have all slots.
    pub(super) fn acquire(
        &self,
        stream: &Arc<UnixStream>,
        pid: u32,
    ) -> Result<AcquiredSlot, Vec<Holder>> {
        let mut table = self.0.lock();
        let mut kind = SlotKind::Ordinary;
        let mut freed = table.free_slot(kind);
        if matches!(freed, FreedSlot::None) {
            kind = SlotKind::Reserved;
            freed = table.free_slot(kind);
        }
        let to_close = match freed {
            FreedSlot::WasFree => None,
            FreedSlot::TakenFrom(idle_connection) => Some(idle_connection),
            FreedSlot::None => return Err(table.list_holders()),
        };
        table.last_id += 1;
        let id = table.last_id;
        let last_activity = table.next_activity();
        table.slots.insert(
            id,
            Slot {
                stream: Arc::clone(stream),
                pid,
                kind,
                state: SlotState::Idle,
                last_activity,
            },
        );
        Ok(AcquiredSlot { id, to_close })
    }

    /// Records that a request of a connection was read, and returns whether it may be answered.
    ///
    /// A connection with a slot of the reserve that sends a long request needs an ordinary slot, which it may take from
    /// an idle connection; the caller closes that. `Lost` means that this connection has lost its own slot, and
    /// `Refused` that no slot is free.
    pub(super) fn begin_request(&self, id: u64, request: &Request) -> Admission {
        let mut table = self.0.lock();
        let last_activity = table.next_activity();
        let Some(slot) = table.slots.get_mut(&id) else {
            return Admission::Lost;
        };
        slot.last_activity = last_activity;
        let mut to_close = None;
        let needs_ordinary_slot = slot.kind == SlotKind::Reserved && !is_short(request);
        if needs_ordinary_slot {
            match table.free_slot(SlotKind::Ordinary) {
                FreedSlot::WasFree => {}
                FreedSlot::TakenFrom(idle_connection) => to_close = Some(idle_connection),
                FreedSlot::None => return Admission::Refused(table.list_holders()),
            }
        }
        let slot = table
            .slots
            .get_mut(&id)
            .expect("only a reserved slot's own connection takes it away");
        if needs_ordinary_slot {
            slot.kind = SlotKind::Ordinary;
        }
        slot.state = SlotState::Busy;
        Admission::Admitted(to_close)
    }

    /// Records that the reply was sent, and what the connection does from then on.
    pub(super) fn end_request(&self, id: u64, state: SlotState) {
        let mut table = self.0.lock();
        if let Some(slot) = table.slots.get_mut(&id) {
            slot.state = state;
        }
    }

    /// Frees the slot of a connection that ended.
    pub(super) fn release(&self, id: u64) {
        self.0.lock().slots.remove(&id);
    }
}

impl SlotTable {
    /// Returns the next number in the order of activity.
    fn next_activity(&mut self) -> u64 {
        self.last_activity += 1;
        self.last_activity
    }

    /// Makes room for one more slot of this kind: if all of them are in use, the connection that was idle longest loses
    /// its slot. Returns `None` if none is idle. The caller closes the connection that lost its slot.
    fn free_slot(&mut self, kind: SlotKind) -> FreedSlot {
        let slots_of_kind = || self.slots.iter().filter(|(_, slot)| slot.kind == kind);
        if slots_of_kind().count() < kind.limit() {
            return FreedSlot::WasFree;
        }
        let longest_idle = slots_of_kind()
            .filter(|(_, slot)| slot.state == SlotState::Idle)
            .min_by_key(|(_, slot)| slot.last_activity);
        let Some((&id, _)) = longest_idle else {
            return FreedSlot::None;
        };
        match self.slots.remove(&id) {
            Some(slot) => FreedSlot::TakenFrom(slot.stream),
            None => FreedSlot::None,
        }
    }

    /// Returns the processes with the most connections.
    fn list_holders(&self) -> Vec<Holder> {
        let mut counts = BTreeMap::<u32, u32>::new();
        for slot in self.slots.values() {
            *counts.entry(slot.pid).or_default() += 1;
        }
        let mut holders: Vec<Holder> = counts
            .into_iter()
            .map(|(pid, connections)| Holder { pid, connections })
            .collect();
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

    /// Takes a slot and makes it busy, or lets it hold something.
    fn occupied(slots: &ConnectionSlots, pid: u32, holds_state: bool) -> u64 {
        let AcquiredSlot { id, to_close } = slots.acquire(&stream(), pid).ok().unwrap();
        assert!(to_close.is_none());
        assert!(matches!(
            slots.begin_request(id, &wait()),
            Admission::Admitted(None)
        ));
        if holds_state {
            slots.end_request(id, SlotState::Holding);
        }
        id
    }

    #[test]
    fn the_longest_idle_goes_and_what_it_sent_counts_as_not_sent() {
        let slots = ConnectionSlots::default();
        let streams: Vec<_> = (0..ORDINARY_SLOTS).map(|_| stream()).collect();
        let ids: Vec<_> = streams
            .iter()
            .map(|stream| slots.acquire(stream, 1).ok().unwrap().id)
            .collect();
        // The first one was answered last.
        assert!(matches!(
            slots.begin_request(ids[0], &wait()),
            Admission::Admitted(None)
        ));
        slots.end_request(ids[0], SlotState::Idle);
        for expected in streams[1..].iter().chain(&streams[..1]) {
            let AcquiredSlot { to_close, .. } = slots.acquire(&stream(), 2).ok().unwrap();
            assert!(Arc::ptr_eq(&to_close.unwrap(), expected));
        }
        assert!(
            ids.iter()
                .all(|id| matches!(slots.begin_request(*id, &Request::Hello), Admission::Lost))
        );
    }

    #[test]
    fn what_is_busy_or_holds_something_stays_and_the_reserve_answers_what_is_short() {
        let slots = ConnectionSlots::default();
        let ids: Vec<_> = (0..ORDINARY_SLOTS)
            .map(|index| occupied(&slots, 1 + index as u32 % 2, index % 3 == 0))
            .collect();
        let reserved = stream();
        let AcquiredSlot { id, to_close } = slots.acquire(&reserved, 7).ok().unwrap();
        assert!(to_close.is_none());
        for short in [
            Request::Hello,
            Request::Status,
            Request::Unmount {
                force: true,
                held: HeldPolicy::Drain,
            },
        ] {
            assert!(matches!(
                slots.begin_request(id, &short),
                Admission::Admitted(None)
            ));
            slots.end_request(id, SlotState::Idle);
        }
        let Admission::Refused(holders) = slots.begin_request(id, &wait()) else {
            panic!("no ordinary slot is free")
        };
        let holder = |pid, connections| Holder { pid, connections };
        assert_eq!(holders, [holder(1, 32), holder(2, 32), holder(7, 1)]);
        // Connections that send no request do not fill the reserve either.
        for _ in 1..RESERVED_SLOTS {
            assert!(slots.acquire(&stream(), 8).ok().unwrap().to_close.is_none());
        }
        assert!(matches!(
            slots.begin_request(id, &wait()),
            Admission::Refused(_)
        ));
        let AcquiredSlot { to_close, .. } = slots.acquire(&stream(), 9).ok().unwrap();
        assert!(
            !Arc::ptr_eq(&to_close.unwrap(), &reserved),
            "it was answered last"
        );
        // One ordinary slot becomes idle. It goes to a client that sends a request which the reserve does not serve.
        slots.end_request(ids[5], SlotState::Idle);
        let Admission::Admitted(Some(_)) = slots.begin_request(id, &wait()) else {
            panic!("the idle one goes")
        };
        assert!(matches!(
            slots.begin_request(ids[5], &wait()),
            Admission::Lost
        ));
    }

    #[test]
    fn one_too_many_is_refused_and_a_seat_that_is_left_is_free() {
        let slots = ConnectionSlots::default();
        let ids: Vec<_> = (0..ORDINARY_SLOTS)
            .map(|_| occupied(&slots, 1, true))
            .collect();
        for _ in 0..RESERVED_SLOTS {
            let AcquiredSlot { id, .. } = slots.acquire(&stream(), 2).ok().unwrap();
            assert!(matches!(
                slots.begin_request(id, &Request::Status),
                Admission::Admitted(None)
            ));
        }
        let holders = slots.acquire(&stream(), 3).unwrap_err();
        assert_eq!(
            holders.iter().map(|holder| holder.connections).sum::<u32>(),
            72
        );
        slots.release(ids[0]);
        assert!(slots.acquire(&stream(), 3).ok().unwrap().to_close.is_none());
    }
}
