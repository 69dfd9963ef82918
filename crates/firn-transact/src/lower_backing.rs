//! [`LowerBacking`]: the file system below the layer of transactions, and the directory in it with their files.
//!
//! A *backing* is a file system that a mount shows. [`TransactionalBacking`](crate::TransactionalBacking) is a layer
//! over it. A mount of one host keeps the files of its transactions in `.firn/`. With several hosts, each one has a
//! directory of its own below `.firn/`.

use firn_backing::{Backing, Errno};
use firn_hosts::Members;
use firn_hosts::host_dir::host_dir_name;

use crate::own::OwnError;
use crate::staging;

/// Returns the name, below `.firn/`, of the directory of a host's transactions.
pub(crate) fn transactions_dir_name(members: &Members) -> String {
    host_dir_name(&members.host)
}

/// The lowest part of a [`TransactionalBacking`](crate::TransactionalBacking): the backing below, and the
/// directory of this mount's transactions in it.
pub struct LowerBacking<B: Backing> {
    pub(crate) base: B,
    /// The hosts that commit together; `None` on a mount of one host.
    pub(crate) members: Option<Members>,
    /// Device number of the backing's top directory.
    pub(crate) device: u64,
}

impl<B: Backing> LowerBacking<B> {
    /// Returns the hosts that commit together; `None` on a mount of one host.
    pub fn members(&self) -> Option<&Members> {
        self.members.as_ref()
    }

    /// Returns the directory of this host's transactions, and makes it if there is none.
    pub(crate) fn make_transactions_dir(&self) -> Result<B::Inode, OwnError> {
        let firn_dir = staging::make_dir(&self.base, &self.base.root(), staging::FIRN_DIR)?;
        match self.host_dir_name() {
            None => Ok(firn_dir),
            Some(name) => staging::make_dir(&self.base, &firn_dir, &name)
                .map_err(|error| error.below(staging::FIRN_DIR)),
        }
    }

    /// Returns `.firn/`; `None` if it does not exist.
    pub(crate) fn find_firn_dir(&self) -> Result<Option<B::Inode>, OwnError> {
        let found = staging::find_dir(&self.base, &self.base.root(), staging::FIRN_DIR)?;
        Ok(found.map(|(inode, _)| inode))
    }

    /// Returns the directory of this host's transactions; `None` if it does not exist.
    pub(crate) fn find_transactions_dir(&self) -> Result<Option<B::Inode>, OwnError> {
        let Some(firn_dir) = self.find_firn_dir()? else {
            return Ok(None);
        };
        let Some(name) = self.host_dir_name() else {
            return Ok(Some(firn_dir));
        };
        let found = staging::find_dir(&self.base, &firn_dir, &name)
            .map_err(|error| error.below(staging::FIRN_DIR))?;
        Ok(found.map(|(inode, _)| inode))
    }

    /// Returns the path of the directory of this host's transactions, for messages.
    pub(crate) fn transactions_path(&self) -> String {
        match &self.members {
            None => staging::FIRN_DIR.into(),
            Some(members) => format!("{}/{}", staging::FIRN_DIR, transactions_dir_name(members)),
        }
    }

    /// Returns the name of this host's directory below `.firn/`; `None` on a mount of one host, which uses `.firn/`
    /// itself.
    fn host_dir_name(&self) -> Option<String> {
        self.members.as_ref().map(transactions_dir_name)
    }

    /// Syncs the directory of this host's transactions and those above it, so that a recovery finds a transaction.
    pub(crate) fn sync_transactions_dir(&self) -> Result<(), Errno> {
        self.base.sync_dir(&self.make_transactions_dir()?)?;
        if self.members.is_some() {
            let firn_dir = staging::make_dir(&self.base, &self.base.root(), staging::FIRN_DIR)?;
            self.base.sync_dir(&firn_dir)?;
        }
        self.base.sync_dir(&self.base.root())
    }
}
