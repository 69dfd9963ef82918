//! Begin: `Clear`, `Begin`, `Create`.
//!
//! | the last commit of the directory is | before the begin |
//! |---|---|
//! | applied, or there is none | nothing |
//! | decided in this mount | it is applied if data is pending, which was written after it; or else the new one follows it |
//! | decided by an earlier firnd, or a restore that failed | it is applied, and programs see what it brings |

use std::sync::Arc;

use firn_backing::Backing;
use firn_protocol::path::BytePath;

use super::{Answer, Event, Machine, Mount, Pending, Step};
use crate::error::TransactionError;
use crate::object::Object;
use crate::paths::parent_of;
use crate::transaction::handle::{Decided, Known, Place};
use crate::transaction::top::TopMaker;

impl<'a, B: Backing, M: Mount<B>> Machine<'a, B, M> {
    pub(super) fn clear(
        &self,
        path: Vec<u8>,
        known: Known<'a, B>,
    ) -> Result<Step<'a, B>, TransactionError> {
        let mut place = known.place(&path);
        match known.commit {
            Some(commit) if commit.is_recovered() => {
                self.apply_recovered(&commit, &path)?;
                // Programs looked up other objects than the scope's.
                place = Place::directory(&path);
            }
            // Data written after the commit is not part of the new transaction, and cannot drain before it is applied.
            Some(commit) if !self.mount.is_drained(&place.path_now()) => self.apply(&commit)?,
            Some(_) | None => {}
        }
        Ok(Step::Begin {
            place,
            path,
            then: Box::new(Step::Over(Answer::Done)),
        })
    }

    /// Applies a commit before which programs saw the old tree.
    pub(super) fn apply_recovered(
        &self,
        commit: &Decided<'a, B>,
        path: &[u8],
    ) -> Result<(), TransactionError> {
        let path_after = commit.path_after();
        self.apply(commit)?;
        self.mount.forget_names(&[path, &path_after]);
        Ok(())
    }

    pub(super) fn begin(
        &self,
        place: &Place<'a, B>,
        path: &[u8],
        then: Step<'a, B>,
    ) -> Result<Step<'a, B>, TransactionError> {
        self.retry(|| {
            self.mount.quiesce(place, Pending::Drain, |root| {
                self.begin_quiet(root, path)?;
                if self.store.tests_conflicts() {
                    self.mount.begin_accesses(path);
                }
                Ok(())
            })
        })?;
        Ok(then)
    }

    /// Begins a transaction in a scope in which nothing changes.
    pub(super) fn begin_quiet(
        &self,
        root: &Arc<Object<B>>,
        path: &[u8],
    ) -> Result<(), TransactionError> {
        self.store.begin(root, path)?;
        self.mount.note(Event::Begin, path, None);
        Ok(())
    }

    /// The client's rights are looked at last, as mkdir(2) does: they are those of a directory that no transaction has
    /// changed.
    pub(super) fn create(
        &self,
        path: &[u8],
        maker: TopMaker<'_>,
    ) -> Result<Step<'a, B>, TransactionError> {
        let parent_path = parent_of(path);
        let of_parent = |error| TransactionError::Parent {
            path: BytePath::from(parent_path),
            error: Box::new(error),
        };
        let parent = match self.store.tops.top_known_as(parent_path) {
            Some(top) => top,
            None => self.mount.directory_at(parent_path).map_err(of_parent)?,
        };
        self.store.can_begin_created(&parent, path)?;
        self.mount.must_be_writable(parent_path).map_err(|errno| {
            TransactionError::NotWritable {
                path: BytePath::from(parent_path),
                errno,
            }
        })?;
        self.store.begin_created(&parent, path, maker)?;
        self.mount.note(Event::Begin, path, None);
        self.mount.forget_directory(parent_path);
        Ok(Step::Over(Answer::Done))
    }
}
