//! [`LowerBacking`]: the backing below a [`TransactionalBacking`](crate::TransactionalBacking), and the directory in it where
//! this mount keeps its transactions.
//!
//! A mount of one host uses `.firn/`. With several hosts, each one has a directory of its own below `.firn/`.

use firn_backing::{Backing, Errno};
use firn_hosts::Members;
use firn_hosts::host_dir::host_dir_name;

use crate::own::OwnError;
use crate::staging;

/// Returns the name below `.firn/` of a host's staging directory.
pub(crate) fn staging_dir_name(members: &Members) -> String {
    host_dir_name(&members.host)
}

/// The lowest part of a [`TransactionalBacking`](crate::TransactionalBacking): the backing below, and the place of this
/// mount's transactions in it.
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

    /// Returns the staging directory of this host, and makes it if there is none.
    pub(crate) fn staging_dir(&self) -> Result<B::Inode, OwnError> {
        let top = staging::make_dir(&self.base, &self.base.root(), staging::TOP)?;
        match self.own_dir_name() {
            None => Ok(top),
            Some(name) => staging::make_dir(&self.base, &top, &name)
                .map_err(|error| error.below(staging::TOP)),
        }
    }

    /// Returns `.firn/`; `None` if it does not exist.
    pub(crate) fn find_top(&self) -> Result<Option<B::Inode>, OwnError> {
        let found = staging::find_dir(&self.base, &self.base.root(), staging::TOP)?;
        Ok(found.map(|(inode, _)| inode))
    }

    /// Returns the staging directory of this host; `None` if it does not exist.
    pub(crate) fn find_staging_dir(&self) -> Result<Option<B::Inode>, OwnError> {
        let Some(top) = self.find_top()? else {
            return Ok(None);
        };
        match self.own_dir_name() {
            None => Ok(Some(top)),
            Some(name) => {
                let found = staging::find_dir(&self.base, &top, &name);
                Ok(found
                    .map_err(|error| error.below(staging::TOP))?
                    .map(|(inode, _)| inode))
            }
        }
    }

    /// Returns the path of the staging directory, for messages.
    pub(crate) fn staging_path(&self) -> String {
        match &self.members {
            None => staging::TOP.into(),
            Some(members) => format!("{}/{}", staging::TOP, staging_dir_name(members)),
        }
    }

    fn own_dir_name(&self) -> Option<String> {
        self.members.as_ref().map(staging_dir_name)
    }

    /// Syncs the staging directory and the directories above it, so that a recovery finds a transaction's directory.
    pub(crate) fn sync_staging_dir(&self) -> Result<(), Errno> {
        self.base.sync_dir(&self.staging_dir()?)?;
        if self.members.is_some() {
            self.base.sync_dir(&staging::make_dir(
                &self.base,
                &self.base.root(),
                staging::TOP,
            )?)?;
        }
        self.base.sync_dir(&self.base.root())
    }
}
