//! Asks firnd where the bytes of a file are.

use firn_direct::connection::Files;
use firn_format::data_socket::{Extent, FILES_MAX, Reply, Status};

use crate::connect::{self, Wanted};
use crate::devices;
use crate::list::files;
use crate::sys;
use crate::table::{Held, tag};

/// Questions for one read that is beyond the end of a list.
const QUESTIONS_MAX: u32 = 64;
/// From here on no file has bytes: such a question tells whether a list still holds.
const BEYOND_FILES: u64 = i64::MAX as u64;

/// Fetches a list for a read at the offset `at`. Returns firnd's answer.
pub(crate) fn fetch_list(held: &mut Held, at: u64) -> Option<Status> {
    let token = devices::first_token(held.token).or_else(|| devices::token_of(held.fd))?;
    held.list.map_extents()?;
    let mut question = Question::new(held, at);
    let (room, wanted) = (held.list.room()?, question.wanted());
    let (link, first) = connect::connect_to_read(&token, wanted, room)?;
    (held.link, held.token) = (link, token.token);
    match fetch_from(held, question, first)? {
        // One without files of the backing is of the whole file, and one without anything may have it before `at`.
        Status::Ok if at > 0 && !held.list.is_limited() => fetch_known_list(held),
        Status::Ok if at > 0 && held.list.extents().is_empty() => fetch_known_list(held),
        status => Some(status),
    }
}

/// Fetches a list from the beginning of the file on, where the token is known.
pub(crate) fn fetch_known_list(held: &mut Held) -> Option<Status> {
    held.list.map_extents()?;
    let question = Question::new(held, 0);
    fetch_from(held, question, None)
}

/// A question for what comes at the end of a list.
struct Question {
    from: u64,
    files_max: u32,
    files: Files,
    asked_ns: u64,
}

impl Question {
    fn new(held: &Held, from: u64) -> Self {
        // Processes may share a stub in ways that the descriptors of its list would have to follow.
        let names_files = held.tag == tag::READER && (held.list.is_limited() || files::has_room());
        let files_max = if names_files { FILES_MAX as u32 } else { 0 };
        Self {
            from,
            files_max,
            files: Files::new(),
            asked_ns: sys::coarse_ns(),
        }
    }

    fn wanted(&mut self) -> Wanted<'_> {
        Wanted {
            from: self.from,
            files_max: self.files_max,
            files: &mut self.files,
        }
    }

    /// Asks over the connection that is known.
    fn ask(&mut self, held: &mut Held) -> Option<Reply> {
        let link = held.link;
        let token = held.token;
        connect::ask_extents(link, token, self.wanted(), held.list.room()?)
    }
}

/// Fetches a list, whose first part may be there already: all of it, or the first part where it names files of the
/// backing.
fn fetch_from(held: &mut Held, question: Question, mut first: Option<Reply>) -> Option<Status> {
    held.list.map = connect::arena_map(held.link)?;
    held.list.begin_at(question.from);
    let mut question = question;
    loop {
        let reply = first.take().or_else(|| question.ask(held))?;
        match take_answer(held, &mut question, &reply) {
            Status::Ok => {}
            status => return Some(status),
        }
        let end = held.list.end;
        if held.list.is_limited() || end >= held.list.size || end <= question.from {
            return Some(Status::Ok);
        }
        question = Question::new(held, end);
    }
}

/// Takes an answer over.
fn take_answer(held: &mut Held, question: &mut Question, reply: &Reply) -> Status {
    let status = Status::from_word(reply.status);
    if status != Status::Ok {
        return status;
    }
    let owner = held.fd;
    let files = &mut question.files;
    if held.list.add_answer(reply, files, question.asked_ns, owner) {
        Status::Ok
    } else {
        Status::Busy
    }
}

/// Has a list that names files of the backing tell of the byte at an offset. `Some(false)`: the fallback reads it; `None`:
/// the list does not hold any more.
pub(crate) fn reach(held: &mut Held, at: u64) -> Option<bool> {
    if held.list.covers(at) {
        return Some(true);
    }
    if !held.list.is_limited() || at >= held.list.size || !held.list.make_way(at) {
        return Some(false);
    }
    for _ in 0..QUESTIONS_MAX {
        if !held.list.has_room() {
            break;
        }
        let end = held.list.end;
        let mut question = Question::new(held, end);
        let reply = question.ask(held)?;
        if take_answer(held, &mut question, &reply) != Status::Ok {
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

/// Begins the list anew at an offset of which it says that it has to be asked for; the extent there. `None`: the list does
/// not hold any more.
pub(crate) fn ask_again(held: &mut Held, at: u64) -> Option<Option<Extent>> {
    held.list.begin_at(at);
    reach(held, at)?;
    Some(held.list.find_extent(at))
}

/// Whether a list still holds; asks firnd where this process cannot tell.
pub(crate) fn is_valid(held: &mut Held) -> bool {
    if !held.list.is_expired() {
        return true;
    }
    let mut question = Question::new(held, BEYOND_FILES);
    let mut nothing = [];
    let reply = connect::ask_extents(held.link, held.token, question.wanted(), &mut nothing);
    let Some(reply) = reply.filter(connect::is_ok) else {
        return false;
    };
    let list = &mut held.list;
    list.note_valid(&reply, question.asked_ns);
    reply.stamp == list.stamp && reply.size == list.size && !list.is_expired()
}
