//! Requests extents of a file from firnd, and builds and extends its list.

use firn_direct::connection::Files;
use firn_format::data_socket::{Extent, FILES_MAX, Reply, Status};

use crate::connect::{self, ExtentRequest};
use crate::devices;
use crate::list::files;
use crate::sys;
use crate::table::{Held, tag};

/// Maximum number of requests for one read beyond the end of a list.
const REQUESTS_MAX: u32 = 64;
/// An offset at which no file has bytes. A request for it only asks whether a list is still valid.
const BEYOND_FILES: u64 = i64::MAX as u64;

/// Fetches a list for a read at the offset `at`, over a new connection if needed. Returns firnd's status; `None` if there is
/// no connection or no memory.
pub(crate) fn fetch_list(held: &mut Held, at: u64) -> Option<Status> {
    let token = devices::first_token(held.token).or_else(|| devices::token_of(held.fd))?;
    held.list.map_extents()?;
    let mut request = ListRequest::new(held, at);
    let (room, extent_request) = (held.list.room()?, request.extent_request());
    let (link, first) = connect::connect_to_read(&token, extent_request, room)?;
    (held.link, held.token) = (link, token.token);
    match fetch_from(held, request, first)? {
        // A list without files of the backing is to cover the whole file. An empty list may have extents before `at`.
        Status::Ok if at > 0 && !held.list.is_limited() => fetch_known_list(held),
        Status::Ok if at > 0 && held.list.extents().is_empty() => fetch_known_list(held),
        status => Some(status),
    }
}

/// Fetches a list from the beginning of the file, over the known connection.
pub(crate) fn fetch_known_list(held: &mut Held) -> Option<Status> {
    held.list.map_extents()?;
    let request = ListRequest::new(held, 0);
    fetch_from(held, request, None)
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
    asked_ns: u64,
}

impl ListRequest {
    fn new(held: &Held, from: u64) -> Self {
        // A stub may be shared with other processes, and then the descriptors in its list would have to be shared too. So a
        // stub's list names no files.
        let names_files = held.tag == tag::READER && (held.list.is_limited() || files::has_room());
        let files_max = if names_files { FILES_MAX as u32 } else { 0 };
        Self {
            from,
            files_max,
            files: Files::new(),
            asked_ns: sys::coarse_ns(),
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
    fn ask(&mut self, held: &mut Held) -> Option<Reply> {
        let link = held.link;
        let token = held.token;
        connect::ask_extents(link, token, self.extent_request(), held.list.room()?)
    }
}

/// Fetches a list from the request's offset on. `first` is the first answer if it is known already.
///
/// A list without files of the backing is fetched up to the end of the file, another one only in its first part.
fn fetch_from(held: &mut Held, request: ListRequest, mut first: Option<Reply>) -> Option<Status> {
    held.list.map = connect::arena_map(held.link)?;
    held.list.begin_at(request.from);
    let mut request = request;
    loop {
        let reply = first.take().or_else(|| request.ask(held))?;
        match take_answer(held, &mut request, &reply) {
            Status::Ok => {}
            status => return Some(status),
        }
        let end = held.list.end;
        if held.list.is_limited() || end >= held.list.size || end <= request.from {
            return Some(Status::Ok);
        }
        request = ListRequest::new(held, end);
    }
}

/// Extends the list by an answer. Returns the answer's status, or `Busy` if the file has changed since the first answer.
fn take_answer(held: &mut Held, request: &mut ListRequest, reply: &Reply) -> Status {
    let status = Status::from_word(reply.status);
    if status != Status::Ok {
        return status;
    }
    let owner = held.fd;
    let files = &mut request.files;
    if held.list.add_answer(reply, files, request.asked_ns, owner) {
        Status::Ok
    } else {
        Status::Busy
    }
}

/// Extends a list that names files of the backing up to the byte at an offset.
///
/// `Some(true)` means that the list covers the byte, `Some(false)` that the fallback must read it, and `None` that the list
/// is void.
pub(crate) fn reach(held: &mut Held, at: u64) -> Option<bool> {
    if held.list.covers(at) {
        return Some(true);
    }
    if !held.list.is_limited() || at >= held.list.size || !held.list.prepare_to_reach(at) {
        return Some(false);
    }
    for _ in 0..REQUESTS_MAX {
        if !held.list.has_room() {
            break;
        }
        let end = held.list.end;
        let mut request = ListRequest::new(held, end);
        let reply = request.ask(held)?;
        if take_answer(held, &mut request, &reply) != Status::Ok {
            return None;
        }
        if held.list.covers(at) {
            return Some(true);
        }
        if held.list.end <= end {
            break;
        }
    }
    Some(false)
}

/// Begins the list anew at an offset whose extent must be requested again. Returns the extent there or behind it. `None`
/// means that the list is void.
pub(crate) fn ask_again(held: &mut Held, at: u64) -> Option<Option<Extent>> {
    held.list.begin_at(at);
    reach(held, at)?;
    Some(held.list.find_extent(at))
}

/// Whether a list is still valid. If its time is over, firnd is asked, and may prolong it.
pub(crate) fn is_valid(held: &mut Held) -> bool {
    if !held.list.is_expired() {
        return true;
    }
    let mut request = ListRequest::new(held, BEYOND_FILES);
    let mut nothing = [];
    let reply = connect::ask_extents(
        held.link,
        held.token,
        request.extent_request(),
        &mut nothing,
    );
    let Some(reply) = reply.filter(connect::is_ok) else {
        return false;
    };
    let list = &mut held.list;
    list.note_valid(&reply, request.asked_ns);
    reply.stamp == list.stamp && reply.size == list.size && !list.is_expired()
}
