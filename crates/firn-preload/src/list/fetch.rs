//! Requests the *extents* of a file (ranges of its bytes and their places) from firnd, and builds its list of them.

use firn_direct::connection::Files;
use firn_format::data_socket::{Extent, FILES_MAX, Reply, Status};

use crate::connect::{self, ExtentRequest};
use crate::devices;
use crate::list::{ListFailed, files};
use crate::sys;
use crate::table::{LockedEntry, tag};

/// Maximum number of requests for one read beyond the end of a list.
const REQUESTS_MAX: u32 = 64;
/// An offset at which no file has bytes. A request for it only asks whether a list is still valid.
const BEYOND_FILES: u64 = i64::MAX as u64;

/// Fetches a *list* of the places of a file's bytes from firnd (the serving process), for a read at an offset, over a
/// new connection if needed. Returns firnd's status; `None` if there is no connection or no memory.
pub(crate) fn connect_and_fetch(locked: &mut LockedEntry, offset: u64) -> Option<Status> {
    // The token says how firnd names the open file, and at which socket. It may be known from the open already.
    let token = devices::first_token(locked.token).or_else(|| devices::fetch_token(locked.fd))?;
    locked.list.map_extents()?;
    let mut request = ListRequest::new(locked, offset);
    let extents = locked.list.free_extents()?;
    let (link, first_reply) = connect::connect_to_read(&token, request.extent_request(), extents)?;
    (locked.link, locked.token) = (link, token.token);
    let status = fetch_answers(locked, request, first_reply)?;
    if status != Status::Ok || offset == 0 {
        return Some(status);
    }
    // A list without files of the backing (the directory below the mount) has no time limit, and must cover the whole
    // file. An empty list shows only that nothing is listed from `offset` on; there may be extents before it.
    if !locked.list.has_time_limit() || locked.list.extents().is_empty() {
        return fetch_whole_list(locked);
    }
    Some(status)
}

/// Fetches a list from the beginning of the file, over the known connection. Returns as [`connect_and_fetch`].
pub(crate) fn fetch_whole_list(locked: &mut LockedEntry) -> Option<Status> {
    locked.list.map_extents()?;
    let request = ListRequest::new(locked, 0);
    fetch_answers(locked, request, None)
}

/// A request for the extents from some offset on.
struct ListRequest {
    /// The offset in the file.
    from: u64,
    /// Maximum number of files of the backing in the answer.
    files_max: u32,
    /// Receives the descriptors of these files.
    files: Files,
    /// When the request was made, in the clock of [`sys::coarse_ns`].
    requested_ns: u64,
}

impl ListRequest {
    fn new(locked: &LockedEntry, from: u64) -> Self {
        // A stub may be shared with other processes, and then the descriptors in its list would have to be shared too.
        // So a stub's list names no files.
        let names_files =
            locked.tag == tag::READER && (locked.list.has_time_limit() || files::has_room());
        let files_max = if names_files { FILES_MAX as u32 } else { 0 };
        Self {
            from,
            files_max,
            files: Files::new(),
            requested_ns: sys::coarse_ns(),
        }
    }

    fn extent_request(&mut self) -> ExtentRequest<'_> {
        ExtentRequest {
            from: self.from,
            files_max: self.files_max,
            files: &mut self.files,
        }
    }

    /// Makes the request over the known connection. Returns `None` if the connection has ended or the list is full.
    fn send(&mut self, locked: &mut LockedEntry) -> Option<Reply> {
        let link = locked.link;
        let token = locked.token;
        connect::request_extents(
            link,
            token,
            self.extent_request(),
            locked.list.free_extents()?,
        )
    }
}

/// Fetches a *list* of the places of a file's bytes, from the request's offset on. `first_reply` is the first answer of
/// firnd if it is known already. Returns firnd's status; `None` if the connection has ended.
///
/// A list without files of the backing (the directory below the mount) is fetched up to the end of the file. If the
/// list names such files, it is valid for a limited time, and only the first answer is fetched.
fn fetch_answers(
    locked: &mut LockedEntry,
    mut request: ListRequest,
    mut first_reply: Option<Reply>,
) -> Option<Status> {
    locked.list.map = connect::arena_map(locked.link)?;
    locked.list.restart_at(request.from);
    loop {
        let reply = match first_reply.take() {
            Some(reply) => reply,
            None => request.send(locked)?,
        };
        let status = add_answer_to_list(locked, &mut request, &reply);
        if status != Status::Ok {
            return Some(status);
        }
        let known_end = locked.list.end;
        let is_complete = known_end >= locked.list.size;
        let has_grown = known_end > request.from;
        if locked.list.has_time_limit() || is_complete || !has_grown {
            return Some(Status::Ok);
        }
        request = ListRequest::new(locked, known_end);
    }
}

/// Extends the list of the places of a file's bytes by an answer of firnd. Returns the answer's status, or `Busy` if
/// the file has changed since the first answer.
fn add_answer_to_list(
    locked: &mut LockedEntry,
    request: &mut ListRequest,
    reply: &Reply,
) -> Status {
    let status = Status::from_word(reply.status);
    if status != Status::Ok {
        return status;
    }
    let owner = locked.fd;
    let is_unchanged =
        locked
            .list
            .add_answer(reply, &mut request.files, request.requested_ns, owner);
    if is_unchanged {
        Status::Ok
    } else {
        Status::Busy
    }
}

/// Extends a list of the places of a file's bytes, up to the byte at an offset. Returns whether the list covers the
/// byte then; otherwise the fallback (the kernel or firnd) must read it. The error means that the list is void. Only a
/// list with files of the backing (and so with a time limit) is extended: any other covers the whole file.
pub(crate) fn extend_to(locked: &mut LockedEntry, offset: u64) -> Result<bool, ListFailed> {
    if locked.list.covers(offset) {
        return Ok(true);
    }
    let may_extend = locked.list.has_time_limit() && offset < locked.list.size;
    if !may_extend || !locked.list.restart_or_extend(offset) {
        return Ok(false);
    }
    for _ in 0..REQUESTS_MAX {
        if !locked.list.has_capacity() {
            break;
        }
        let old_end = locked.list.end;
        let mut request = ListRequest::new(locked, old_end);
        let reply = request.send(locked).ok_or(ListFailed)?;
        if add_answer_to_list(locked, &mut request, &reply) != Status::Ok {
            return Err(ListFailed);
        }
        if locked.list.covers(offset) {
            return Ok(true);
        }
        let has_grown = locked.list.end > old_end;
        if !has_grown {
            break;
        }
    }
    Ok(false)
}

/// Restarts the list at an offset whose extent must be requested again. Returns the extent there or behind it. The
/// error means that the list is void.
pub(crate) fn request_again(
    locked: &mut LockedEntry,
    offset: u64,
) -> Result<Option<Extent>, ListFailed> {
    locked.list.restart_at(offset);
    extend_to(locked, offset)?;
    Ok(locked.list.find_extent(offset))
}

/// Makes sure that a list of the places of a file's bytes is still valid, and returns whether it is. A list names files
/// of the backing (the directory below the mount) for a limited time. If the time is over, firnd is asked and may
/// prolong it.
pub(crate) fn revalidate(locked: &mut LockedEntry) -> bool {
    if !locked.list.is_expired() {
        return true;
    }
    // No file has bytes at this offset, so the answer has no extents.
    let mut request = ListRequest::new(locked, BEYOND_FILES);
    let mut no_extents = [];
    let reply = connect::request_extents(
        locked.link,
        locked.token,
        request.extent_request(),
        &mut no_extents,
    );
    let Some(reply) = reply.filter(connect::is_granted) else {
        return false;
    };
    let list = &mut locked.list;
    list.prolong_validity(&reply, request.requested_ns);
    let is_unchanged = reply.stamp == list.stamp && reply.size == list.size;
    is_unchanged && !list.is_expired()
}
