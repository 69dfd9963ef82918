//! Asks firnd where the bytes of a file are.

use firn_format::data_socket::{EXTENTS_MAX, Reply, Status};

use crate::connect;
use crate::devices;
use crate::table::Held;

/// Fetches the whole list; how firnd answered.
pub(crate) fn fetch_list(held: &mut Held) -> Option<Status> {
    let token = devices::first_token(held.token).or_else(|| devices::token_of(held.fd))?;
    held.list.map_extents()?;
    let (link, first) = connect::connect_to_read(&token, held.list.room()?)?;
    (held.link, held.token) = (link, token.token);
    fetch_from(held, first)
}

/// The same where the token is known.
pub(crate) fn fetch_known_list(held: &mut Held) -> Option<Status> {
    held.list.map_extents()?;
    fetch_from(held, None)
}

/// Fetches the list, whose first part may be there already.
fn fetch_from(held: &mut Held, mut first: Option<Reply>) -> Option<Status> {
    held.list.map = connect::arena_map(held.link)?;
    let mut from = 0;
    loop {
        let reply = first.take().or_else(|| fetch_some(held, from))?;
        let status = Status::from_word(reply.status);
        if status != Status::Ok {
            return Some(status);
        }
        if !held.list.add_answer(&reply) {
            return Some(Status::Busy);
        }
        let end = held.list.end();
        if (reply.count as usize) < EXTENTS_MAX || end <= from {
            return Some(Status::Ok);
        }
        from = end;
    }
}

/// Fetches the extents from an offset on, behind those that are there.
fn fetch_some(held: &mut Held, from: u64) -> Option<Reply> {
    let link = held.link;
    let token = held.token;
    connect::ask_extents(link, token, from, held.list.room()?)
}
