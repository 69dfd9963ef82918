//! Helpers that several of these tests use.

#![allow(dead_code)] // Not every test uses all of it.

use std::ffi::OsStr;

use std::sync::Arc;

use firn_backing::{Backing, Names, Volume};
use firn_sim::SimBacking;
use firn_sim::{Tree, tree};
use firn_transact::conflict::AccessedFile;
use firn_transact::{
    AbortError, CommitError, Object, PrepareError, StageError, StoreError, TransactionHandle,
    TransactionalBacking, VoteError,
};

pub fn seen(on: &impl Backing) -> Tree {
    tree(on).expect("tree")
}

/// Returns the seeds of a random test, beginning with `FIRN_SEED`: `count` seeds of `ops_per_seed` operations each. If
/// `FIRN_OPS` asks for more operations in all, returns more seeds.
pub fn seeds(count: u64, ops_per_seed: u64) -> std::ops::Range<u64> {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    let first = number("FIRN_SEED").unwrap_or(1);
    let ops = number("FIRN_OPS").unwrap_or(0);
    first..first + count.max(ops / ops_per_seed)
}

/// Returns the names in `.firn/`.
pub fn in_firn(disk: &SimBacking) -> Vec<String> {
    let Ok((firn, _)) = disk.lookup(&disk.root(), OsStr::new(".firn")) else {
        return Vec::new();
    };
    let mut names = Vec::new();
    let dir = disk.open_dir(&firn).expect("open");
    disk.read_dir(&dir, 0, &mut |entry| {
        names.push(entry.name.to_string_lossy().into_owned());
        true
    })
    .expect("list");
    names
}

/// The verbs for the transaction whose scope has the top `root`, whatever its stage is.
pub trait Verbs<B: Backing> {
    fn prepare(&self, root: &Arc<Object<B>>, id: u64) -> Result<(), PrepareError>;
    fn decide(&self, root: &Arc<Object<B>>, id: u64) -> Result<(), CommitError>;
    fn commit(&self, root: &Arc<Object<B>>, id: u64) -> Result<(), CommitError>;
    fn apply(&self, scope: &[u8]) -> Result<(), StoreError>;
    fn abort(&self, root: &Arc<Object<B>>) -> Result<(), AbortError>;
    fn refuse(&self, root: &Arc<Object<B>>) -> Result<(), AbortError>;
    fn give_up_next(&self, scope: &[u8]);
    fn reopen(&self, root: &Arc<Object<B>>, id: u64) -> Result<Vec<AccessedFile>, VoteError>;
    fn store_accesses(
        &self,
        root: &Arc<Object<B>>,
        used: Vec<AccessedFile>,
    ) -> Result<(), VoteError>;
    fn publish_accesses(&self, root: &Arc<Object<B>>, id: u64) -> Result<(), VoteError>;
}

impl<B: Backing> Verbs<B> for TransactionalBacking<B> {
    fn prepare(&self, root: &Arc<Object<B>>, id: u64) -> Result<(), PrepareError> {
        let found = self.transaction_at(root);
        let found = found.ok_or(StageError::NoTransaction)?;
        found.prepare(id).map(drop)
    }

    fn decide(&self, root: &Arc<Object<B>>, id: u64) -> Result<(), CommitError> {
        let found = self.transaction_at(root).ok_or(StageError::NoTransaction)?;
        // Another transaction may follow the commit with this number.
        match self.first_transaction(found.scope()) {
            Some(first) if first.id() == Some(id) => first.decide(id).map(drop),
            _ => found.decide(id).map(drop),
        }
    }

    fn commit(&self, root: &Arc<Object<B>>, id: u64) -> Result<(), CommitError> {
        let scope = self.transaction_at(root).ok_or(StageError::NoTransaction)?;
        self.decide(root, id)?;
        Ok(self.apply(scope.scope())?)
    }

    fn apply(&self, scope: &[u8]) -> Result<(), StoreError> {
        match self
            .first_transaction(scope)
            .and_then(TransactionHandle::decided)
        {
            Some(commit) => commit.apply(),
            None => Ok(()),
        }
    }

    fn abort(&self, root: &Arc<Object<B>>) -> Result<(), AbortError> {
        let found = self.transaction_at(root);
        found.ok_or(StageError::NoTransaction)?.abort()
    }

    fn refuse(&self, root: &Arc<Object<B>>) -> Result<(), AbortError> {
        let found = self.transaction_at(root);
        found.ok_or(StageError::NoTransaction)?.refuse_changes()
    }

    fn give_up_next(&self, scope: &[u8]) {
        if let Some(commit) = self
            .first_transaction(scope)
            .and_then(TransactionHandle::decided)
        {
            commit.give_up_next();
        }
    }

    fn reopen(&self, root: &Arc<Object<B>>, id: u64) -> Result<Vec<AccessedFile>, VoteError> {
        match self.transaction_at(root).ok_or(StageError::NoTransaction)? {
            TransactionHandle::Open(_) => Ok(Vec::new()),
            TransactionHandle::Prepared(prepared) if prepared.id() == id => prepared.reopen(),
            found => Err(StageError::OtherId {
                found: found.id().unwrap_or_default(),
                wanted: id,
            }
            .into()),
        }
    }

    fn store_accesses(
        &self,
        root: &Arc<Object<B>>,
        used: Vec<AccessedFile>,
    ) -> Result<(), VoteError> {
        match self.transaction_at(root) {
            Some(TransactionHandle::Prepared(prepared)) => prepared.store_accesses(used),
            Some(_) => panic!("noted before it is prepared"),
            None => return Err(StageError::NoTransaction.into()),
        }
        Ok(())
    }

    fn publish_accesses(&self, root: &Arc<Object<B>>, id: u64) -> Result<(), VoteError> {
        match self.transaction_at(root) {
            Some(TransactionHandle::Prepared(prepared)) if prepared.id() == id => {
                prepared.publish_accesses()
            }
            Some(_) => Err(VoteError::NotVoted { id }),
            None => Err(StageError::NoTransaction.into()),
        }
    }
}
