//! Where the transactions of a mount are kept: `.firn/`, or of one of several hosts a directory of its own in it.

use firn_backing::{Backing, Errno};
use firn_hosts::Members;
use firn_hosts::host_dir::host_dir_name;

use crate::own::OwnError;
use crate::staging;

/// Name in `.firn/` of the staging directory of a host.
pub(crate) fn staging_dir_name(members: &Members) -> String {
    host_dir_name(&members.host)
}

/// The lowest part of a [`TransactionalBacking`](crate::TransactionalBacking): the backing below, and where the transactions
/// of this mount are kept in it.
pub struct Home<B: Backing> {
    pub(crate) base: B,
    /// Where several hosts commit together.
    pub(crate) members: Option<Members>,
    /// The device that the top is on.
    pub(crate) device: u64,
}

impl<B: Backing> Home<B> {
    /// The hosts that commit together, if there are several.
    pub fn members(&self) -> Option<&Members> {
        self.members.as_ref()
    }

    /// The directory of what this host's transactions keep, made if it is not there.
    pub(crate) fn staging_dir(&self) -> Result<B::Inode, OwnError> {
        let top = staging::dir(&self.base, &self.base.root(), staging::TOP)?;
        match self.own_dir_name() {
            None => Ok(top),
            Some(name) => {
                staging::dir(&self.base, &top, &name).map_err(|error| error.below(staging::TOP))
            }
        }
    }

    /// `.firn/`, if it is there.
    pub(crate) fn find_top(&self) -> Result<Option<B::Inode>, OwnError> {
        let found = staging::find_dir(&self.base, &self.base.root(), staging::TOP)?;
        Ok(found.map(|(inode, _)| inode))
    }

    /// [`Home::staging_dir`], if it is there.
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

    /// Its path, for people.
    pub(crate) fn staging_path(&self) -> String {
        match &self.members {
            None => staging::TOP.into(),
            Some(members) => format!("{}/{}", staging::TOP, staging_dir_name(members)),
        }
    }

    fn own_dir_name(&self) -> Option<String> {
        self.members.as_ref().map(staging_dir_name)
    }

    /// Makes durable where the directory of a transaction is found.
    pub(crate) fn sync_staging_dir(&self) -> Result<(), Errno> {
        self.base.sync_dir(&self.staging_dir()?)?;
        if self.members.is_some() {
            self.base
                .sync_dir(&staging::dir(&self.base, &self.base.root(), staging::TOP)?)?;
        }
        self.base.sync_dir(&self.base.root())
    }
}
