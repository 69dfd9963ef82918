//! Requests about stubs, for which there is no kernel to go to.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc;

use firn_backing::{Backing, Errno};
use firn_engine::{
    ClientId, ClosePolicy, Closing, Done, DrainPolicy, Engine, FsyncPolicy, HandleId, Written,
};
use firn_format::data_socket::{ADOPT_AGAIN, AT_END, DATA_BYTES_MAX, Op, Reply, Request, Status};
use firn_stub::{StubAttr, StubId, Tree};
use parking_lot::Mutex;

use super::Answer;

/// Whether a request is one of those.
pub(super) fn is_op(op: Op) -> bool {
    use Op::*;
    matches!(
        op,
        Adopt | Release | Read | Write | Attr | AttrOf | Truncate | Sync | Allocate
    )
}

/// One request.
pub(super) struct Call<'a, B: Backing> {
    pub tree: &'a Arc<Tree<B>>,
    pub engine: &'a Arc<Engine<B>>,
    pub appending: &'a Mutex<()>,
    pub client: ClientId,
}

impl<B: Backing> Call<'_, B> {
    /// `None`: the request makes no sense.
    pub(super) fn answer(
        &self,
        op: Op,
        request: &Request,
        data: &[u8],
        given: Option<OwnedFd>,
    ) -> Option<Answer> {
        let &Request {
            len, token, arg, ..
        } = request;
        let takes_data = matches!(op, Op::Write | Op::Allocate);
        let takes_len = matches!(op, Op::Write | Op::Allocate | Op::Read | Op::Adopt);
        if given.is_some() != (op == Op::Adopt)
            || (takes_data && data.len() != len as usize)
            || (!takes_data && !data.is_empty())
            || (!takes_len && len != 0)
            || len as usize > DATA_BYTES_MAX
        {
            return None;
        }
        if op == Op::AttrOf {
            let id = StubId {
                inode: token,
                generation: u32::try_from(arg).ok()?,
            };
            return Some(match self.tree.attr(id) {
                Ok(Some(attr)) => attr_answer(attr),
                Ok(None) => Answer::status(Status::BadToken),
                Err(errno) => failed(errno),
            });
        }
        if op == Op::Adopt {
            return Some(self.adopt(given?, arg as i32, len == ADOPT_AGAIN));
        }
        let handle = HandleId(token);
        if !self.tree.is_open(handle, self.client) {
            return Some(Answer::status(Status::BadToken));
        }
        let done = match op {
            Op::Release => self.release(handle).map(|()| ok()),
            Op::Read => return Some(self.read(handle, arg, len as usize)),
            Op::Write => self.write(handle, arg, data),
            Op::Attr => self.tree.attr_of(handle).map(attr_answer),
            Op::Truncate => self.tree.truncate(handle, arg).map(|()| ok()),
            Op::Sync => self.sync(handle, arg == 1).map(|()| ok()),
            Op::Allocate => {
                let (offset, rest) = data.split_first_chunk::<8>()?;
                let offset = u64::from_ne_bytes(*offset);
                let len = u64::from_ne_bytes(rest.try_into().ok()?);
                self.engine
                    .allocate(handle, arg as i32, offset, len)
                    .map(|()| ok())
            }
            _ => return None,
        };
        Some(done.unwrap_or_else(failed))
    }

    fn adopt(&self, given: OwnedFd, flags: i32, again: bool) -> Answer {
        match self.tree.adopt(self.client, given, flags, again) {
            Ok(adopted) => Reply {
                file_id: adopted.handle.0,
                size: adopted.size,
                ..Reply::default()
            }
            .into(),
            Err(Errno::XDEV) => Answer::status(Status::BadToken),
            Err(errno) => failed(errno),
        }
    }

    fn read(&self, handle: HandleId, at: u64, len: usize) -> Answer {
        let mut bytes = vec![0; len];
        match self.engine.read(handle, at, &mut bytes) {
            Ok(n) => {
                bytes.truncate(n);
                Answer(
                    Reply {
                        count: n as u32,
                        ..Reply::default()
                    },
                    bytes,
                    Vec::new(),
                )
            }
            Err(errno) => failed(errno),
        }
    }

    fn write(&self, handle: HandleId, at: u64, data: &[u8]) -> Result<Answer, Errno> {
        let alone = (at == AT_END).then(|| self.appending.lock());
        let at = if alone.is_some() {
            self.tree.attr_of(handle)?.size
        } else {
            at
        };
        let mut swept = false;
        loop {
            match self.engine.write(handle, at, data, None)? {
                Written::Bytes(n) => {
                    return Ok(Reply {
                        count: n as u32,
                        slot: at,
                        ..Reply::default()
                    }
                    .into());
                }
                Written::Full if !swept => {
                    // What was removed in the tree frees its room only now.
                    swept = true;
                    self.tree.sweep()?;
                }
                Written::Full => self.tree.wait_for_room()?,
            }
        }
    }

    fn sync(&self, handle: HandleId, data_only: bool) -> Result<(), Errno> {
        if self.engine.fsync_policy() == FsyncPolicy::Durable {
            self.tree.bring_open(handle)?;
        }
        wait(|done| self.engine.fsync(handle, done))?;
        self.engine.sync_file(handle, data_only)
    }

    fn release(&self, handle: HandleId) -> Result<(), Errno> {
        let options = self.engine.options();
        let drains = options.close == ClosePolicy::Drain && options.drain == DrainPolicy::Eager;
        let named = if drains {
            self.tree.bring_open(handle)
        } else {
            Ok(())
        };
        let finishes = self.engine.finishes_file(handle, &|_| true);
        let drained = wait(|done| self.engine.flush(handle, Closing::Called, done));
        let drained = match finishes {
            true => drained.and_then(|()| self.engine.finish_file(handle)),
            false => drained,
        };
        self.tree.release(handle);
        drained.and(named)
    }
}

fn ok() -> Answer {
    Answer::status(Status::Ok)
}

fn failed(errno: Errno) -> Answer {
    let errno = errno.raw_os_error().unsigned_abs();
    Reply {
        status: Status::Failed as u32,
        errno,
        ..Reply::default()
    }
    .into()
}

fn attr_answer(attr: StubAttr) -> Answer {
    let count = u32::from(attr.told);
    Reply {
        count,
        size: attr.size,
        slot: attr.blocks,
        ..Reply::default()
    }
    .into()
}

/// Waits for something that calls back.
fn wait(begin: impl FnOnce(Done)) -> Result<(), Errno> {
    let (sender, receiver) = mpsc::channel();
    begin(Box::new(move |result| {
        let _ = sender.send(result);
    }));
    receiver.recv().unwrap_or(Err(Errno::IO))
}
