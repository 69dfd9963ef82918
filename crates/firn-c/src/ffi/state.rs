//! The functions of the C interface for the state of a mount, for drains and for waits.
//!
//! A drain writes bytes from memory to the *backing*, the directory that the mount serves. The constants below are the
//! durability levels that firn.h documents, from bytes in memory only (held) to bytes that are synced (durable).

use std::ffi::c_int;

use firn_format::durability::DurabilityLevel;
use firn_protocol::Status;

use super::{CPath, CallerPlace, CallerSized, Handle, NO_PLACE, OutPlace, guarded, mount_of};
use crate::error::Error;

/// `FIRN_HELD`.
const HELD: c_int = 0;
/// `FIRN_SPILLED`.
const SPILLED: c_int = 1;
/// `FIRN_PARTNERED`.
const PARTNERED: c_int = 2;
/// `FIRN_LOGGED`.
const LOGGED: c_int = 3;
/// `FIRN_DRAINED`.
const DRAINED: c_int = 4;
/// `FIRN_DURABLE`.
const DURABLE: c_int = 5;
/// `FIRN_FOREVER`.
const FOREVER: u64 = u64::MAX;

/// `struct firn_status`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct MountStatus {
    /// Size of this struct in the program.
    size: usize,
    /// Bytes that programs wrote and that are not in the backing yet.
    held_bytes: u64,
    /// Number of files with held bytes.
    held_files: u64,
    /// Age of the oldest held byte in milliseconds. 0 means that no byte is held.
    oldest_held_ms: u64,
    /// Size of the memory that the mount may use.
    arena_bytes: u64,
    /// Size of the part of this memory that is in use.
    arena_used_bytes: u64,
    /// Size of the spill file. 0 means that there is none.
    spill_bytes: u64,
    /// Size of the part of the spill file that is in use.
    spill_used_bytes: u64,
    /// Bytes written to the backing since firnd attached.
    drained_bytes: u64,
    /// Number of failed writes to the backing since firnd attached.
    drain_errors: u64,
    /// Number of errors in the list of `firn status`.
    recorded_errors: u64,
    /// Number of writers that wait for free memory.
    waiting_writers: u64,
    /// Number of files that are open through the mount.
    open_files: u64,
    /// Process id of firnd.
    pid: u64,
}

const _: () = assert!(size_of::<MountStatus>() == 14 * 8);
// SAFETY: `repr(C)` of words without padding, and the first is `size`.
unsafe impl CallerSized for MountStatus {}

impl MountStatus {
    /// Converts the state of a mount for C. The field `size` is that of this version's structure; a mount without a
    /// spill file (a file on a local device for bytes that do not fit into memory) has zeros for it.
    fn from_status(status: &Status) -> Self {
        let spill = status.spill.as_ref();
        Self {
            size: size_of::<Self>(),
            held_bytes: status.held_bytes,
            held_files: status.held_files,
            oldest_held_ms: status
                .oldest_held_seconds
                .map_or(0, |age| (age * 1e3) as u64),
            arena_bytes: status.arena_bytes,
            arena_used_bytes: status.arena_used_bytes,
            spill_bytes: spill.map_or(0, |spill| spill.bytes),
            spill_used_bytes: spill.map_or(0, |spill| spill.used_bytes),
            drained_bytes: status.drain_bytes,
            drain_errors: status.drain_errors,
            recorded_errors: status.errors.len() as u64,
            waiting_writers: status.waiting_writers,
            open_files: status.open_files,
            pid: status.pid.into(),
        }
    }
}

/// `firn_status`.
#[unsafe(no_mangle)]
pub extern "C" fn firn_status(handle: Option<&Handle>, to: CallerPlace<'_, MountStatus>) -> c_int {
    guarded(|| {
        let mount = mount_of(handle)?;
        let status = mount.status()?;
        to.fill(MountStatus::from_status(&status))
    })
}

/// `firn_drain`.
#[unsafe(no_mangle)]
pub extern "C" fn firn_drain(handle: Option<&Handle>, path: CPath<'_>) -> c_int {
    guarded(|| {
        let mount = mount_of(handle)?;
        mount.drain(path.path()?)?;
        Ok(())
    })
}

/// `firn_wait`.
#[unsafe(no_mangle)]
pub extern "C" fn firn_wait(
    handle: Option<&Handle>,
    path: CPath<'_>,
    until: c_int,
    timeout_ms: u64,
) -> c_int {
    guarded(|| {
        let level = awaited_level(until)?;
        let mount = mount_of(handle)?;
        let path = path.path()?;
        let timeout_ms = (timeout_ms != FOREVER).then_some(timeout_ms);
        mount.wait(path, level, timeout_ms)?;
        Ok(())
    })
}

/// Converts the number of a level from C. Fails if no wait can have this level.
fn awaited_level(number: c_int) -> Result<DurabilityLevel, Error> {
    match number {
        PARTNERED => Ok(DurabilityLevel::Partnered),
        LOGGED => Ok(DurabilityLevel::Logged),
        DRAINED => Ok(DurabilityLevel::Drained),
        DURABLE => Ok(DurabilityLevel::Durable),
        _ => Err(Error::Argument(
            "the level to wait for must be FIRN_PARTNERED, FIRN_LOGGED, FIRN_DRAINED or FIRN_DURABLE",
        )),
    }
}

/// Returns the number of a level in C.
pub(super) fn level_number(level: DurabilityLevel) -> c_int {
    match level {
        DurabilityLevel::Held => HELD,
        DurabilityLevel::Spilled => SPILLED,
        DurabilityLevel::Partnered => PARTNERED,
        DurabilityLevel::Logged => LOGGED,
        DurabilityLevel::Drained => DRAINED,
        DurabilityLevel::Durable => DURABLE,
    }
}

/// `firn_get_durability`.
#[unsafe(no_mangle)]
pub extern "C" fn firn_get_durability(
    handle: Option<&Handle>,
    path: CPath<'_>,
    to: OutPlace<'_, c_int>,
) -> c_int {
    guarded(|| {
        let place = to.ok_or(Error::Argument(NO_PLACE))?;
        let level = mount_of(handle)?.level(path.path()?)?;
        place.write(level_number(level));
        Ok(())
    })
}

/// `struct firn_room`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Room {
    /// Size of this struct in the program.
    size: usize,
    /// Bytes of memory that are free, or have drained data that can be evicted.
    memory_bytes: u64,
    /// Free bytes of the spill file. 0 also if there is none.
    spill_bytes: u64,
    /// Bytes available to this user in the backing, less the space that held data will need.
    backing_bytes: u64,
}

const _: () = assert!(size_of::<Room>() == 4 * 8);
// SAFETY: `repr(C)` of words without padding, and the first is `size`.
unsafe impl CallerSized for Room {}

/// `firn_get_room`.
#[unsafe(no_mangle)]
pub extern "C" fn firn_get_room(handle: Option<&Handle>, to: CallerPlace<'_, Room>) -> c_int {
    guarded(|| {
        let free_space = mount_of(handle)?.free_space()?;
        to.fill(Room {
            size: size_of::<Room>(),
            memory_bytes: free_space.memory_bytes,
            spill_bytes: free_space.spill_bytes,
            backing_bytes: free_space.backing_bytes,
        })
    })
}

#[cfg(test)]
mod tests {
    use std::marker::PhantomData;

    use super::*;

    #[test]
    fn a_structure_is_filled_as_far_as_its_size_says() {
        let status = MountStatus {
            size: size_of::<MountStatus>(),
            ..MountStatus::from_status(&Status {
                held_bytes: 1,
                held_files: 2,
                pid: 3,
                ..Status::default()
            })
        };
        // One size is longer than the structure that this library knows, the others are shorter.
        let mut room = [u64::MAX; 20];
        let mut fill = |size: usize| {
            room = [u64::MAX; 20];
            room[0] = size as u64;
            // `room` has more bytes than any size in this test.
            let place = CallerPlace {
                start: room.as_mut_ptr().cast::<MountStatus>(),
                place: PhantomData,
            };
            let done = place.fill(status);
            (done.is_ok(), room)
        };
        assert!(!fill(0).0 && !fill(7).0);
        let (done, room) = fill(16);
        assert!(done && room[..3] == [16, 1, u64::MAX]);
        let (done, room) = fill(size_of::<MountStatus>());
        assert!(done && room[1..3] == [1, 2] && room[13..15] == [3, u64::MAX]);
        let (done, room) = fill(18 * 8);
        assert!(done && room[13..19] == [3, 0, 0, 0, 0, u64::MAX]);
    }
}
