//! The transactions of a mount: the requests for them, their owners (the end of an owner aborts), and the thread that
//! applies commits to the backing.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use firn_backing::is_below;
use firn_engine::Cached;
use firn_format::live::{Stored, Transaction, TransactionOwner};
use firn_protocol::{Reply, Request, Status};
use firn_workers::spawn_thread;

use crate::commit_applier::CommitApplier;
use crate::commit_rules::CommitRules;
use crate::control::ControlClient;
use crate::error::MountError;
use crate::gate::TransactionGate;
use crate::owners::{Owners, ScopeActions};
use crate::part::{ClientRequest, Part, Parts, StopContext};
use crate::status::list_files;
use crate::transactions::{
    RequestContext, abort_orphan, answer_owned, apply_commits_or_find_obstacle, end_transactions,
    find_upgrade_obstacle, is_open, record_undone, refuse_changes_after_decided_commits,
    transaction_statuses,
};

/// Makes the kernel drop what it has cached. Does nothing for a stub tree, of which the kernel caches nothing.
pub(crate) type InvalidateCache = Arc<dyn Fn(Cached) + Send + Sync>;

/// The transactions of a mount.
pub(crate) struct Transactions {
    gate: Arc<TransactionGate>,
    owners: Arc<Owners>,
    applier: Arc<CommitApplier>,
    /// Maximum wait for other hosts.
    hosts_timeout: Duration,
    invalidate_cache: InvalidateCache,
    /// The commit rules, which begin and end transactions for programs that request none.
    rules: Option<Arc<CommitRules>>,
}

impl Transactions {
    /// Returns the part for the transactions of a mount. `gate` makes changes of programs wait for transactions;
    /// `hosts_timeout` limits waits for other hosts. `rules` begin and end transactions for programs that request none,
    /// if the mount has such rules.
    pub(crate) fn new(
        gate: &Arc<TransactionGate>,
        hosts_timeout: Duration,
        invalidate_cache: &InvalidateCache,
        rules: Option<Arc<CommitRules>>,
    ) -> Result<Arc<Self>, MountError> {
        let owners = Owners::new()
            .map_err(io::Error::from)
            .map_err(MountError::io("watch the owners of transactions"))?;
        Ok(Arc::new(Self {
            gate: Arc::clone(gate),
            owners: Arc::new(owners),
            applier: Arc::new(CommitApplier::new(Arc::clone(gate))),
            hosts_timeout,
            invalidate_cache: Arc::clone(invalidate_cache),
            rules,
        }))
    }

    /// Continues the transactions of an earlier firnd, which this one has replaced. `stored` lists them, from the live
    /// table (a mapped file for the next firnd). Their owners are watched again, because the end of an owner aborts.
    /// `aborted_scopes` are the paths of those that could not continue; their programs will get errors.
    pub(crate) fn resume(&self, stored: &[Stored<Transaction>], aborted_scopes: &[Vec<u8>]) {
        self.report_aborted_scopes(aborted_scopes);
        let Some(live) = self.gate.engine().live() else {
            return;
        };
        // Each transaction has an entry in cells of the live table.
        for Stored { entry, cells } in stored {
            let Some(transaction) = self.gate.store().transaction_numbered(entry.serial) else {
                // The transaction has ended, so its entry in the live table goes too.
                live.drop_cells(cells);
                continue;
            };
            // A connection of the earlier firnd is gone, so its transaction is aborted. If an abort had begun already,
            // it is continued in this way, whatever the owner was.
            let owner = if entry.is_ending {
                TransactionOwner::Connection
            } else {
                entry.owner
            };
            self.owners
                .resume(transaction.scope(), owner, transaction.is_open());
            for cell in cells {
                live.adopt_transaction(*entry, *cell);
            }
        }
    }

    /// Records in the log, with the owners and in the counts of rules that these transactions were aborted.
    fn report_aborted_scopes(&self, aborted_scopes: &[Vec<u8>]) {
        for scope in aborted_scopes {
            record_undone(&self.gate, scope);
            self.owners.record_undone(scope);
            if let Some(rules) = &self.rules {
                rules.count_undone(scope);
            }
        }
    }

    /// Answers a request about a transaction, which may have an owner.
    fn answer_request(&self, request: &Request, client: &ControlClient) -> Reply {
        let context = RequestContext {
            apply_later: &|| self.applier.wake(),
            hosts_timeout: self.hosts_timeout,
            invalidate_cache: &*self.invalidate_cache,
        };
        answer_owned(&self.gate, &self.owners, request, &client.peer, &context)
    }

    /// Lists files, and marks those that lie in a transaction.
    fn list_files(
        &self,
        client_request: &ClientRequest<'_>,
        path: &[u8],
        includes_idle: bool,
    ) -> Reply {
        let mut files = list_files(client_request.engine, path, includes_idle);
        // The scopes are read after the files: a transaction that begins later has changed none of the listed files.
        let scopes = self.gate.store().scopes.scopes_now();
        for file in &mut files {
            let path = file.path.as_bytes();
            file.in_transaction = scopes.iter().any(|scope| is_below(path, scope));
        }
        Reply::Files { files }
    }
}

impl Part for Transactions {
    fn start(&self, _: &Parts) -> Result<(), MountError> {
        let owners = Arc::clone(&self.owners);
        let scopes = GateScopes {
            gate: Arc::clone(&self.gate),
            invalidate_cache: Arc::clone(&self.invalidate_cache),
        };
        if let Some(rules) = &self.rules {
            start_rule_threads(rules)?;
        }
        let watch = move || owners.watch(&scopes);
        spawn_thread("firn-owners", watch).map_err(MountError::io(
            "start the thread that watches owners of transactions",
        ))
    }

    fn fill_status(&self, status: &mut Status) {
        status.transactions = transaction_statuses(&self.gate, &self.owners);
        if let Some(rules) = &self.rules {
            rules.fill_status(status);
        }
    }

    fn refuse(&self, request: &Request) -> Option<Reply> {
        let Request::Upgrade { .. } = request else {
            return None;
        };
        let obstacle = find_upgrade_obstacle(&self.gate)?;
        Some(Reply::Error {
            errno: libc::EBUSY,
            message: format!("the upgrade would abort a transaction: {obstacle}"),
        })
    }

    fn answer(&self, client_request: &mut ClientRequest<'_>) -> Option<Reply> {
        match client_request.request {
            request @ (Request::Begin { .. }
            | Request::Prepare { .. }
            | Request::Commit { .. }
            | Request::Abort { .. }
            | Request::Restore { .. }) => Some(self.answer_request(request, client_request.client)),
            Request::Files { path, idle } => {
                Some(self.list_files(client_request, path.as_bytes(), *idle))
            }
            _ => None,
        }
    }

    fn holds_state_of(&self, client: &ControlClient) -> bool {
        self.owners.owns_open_transaction(&client.peer.stream)
    }

    fn find_obstacle(&self) -> Option<String> {
        apply_commits_or_find_obstacle(&self.gate)
    }

    /// Ends transactions as far as this mount can. Changes that wait for a transaction which cannot end here then fail.
    fn prepare_end(&self) {
        // Incomplete checkpoints of commit rules are dropped.
        if let Some(rules) = &self.rules {
            rules.end_all_scopes();
        }
        end_transactions(&self.gate);
        refuse_changes_after_decided_commits(&self.gate);
    }

    /// Stops the threads that watch owners and hosts, and ends the transactions that this mount can end. Changes that
    /// wait for another transaction then fail.
    fn stop(&self, context: &mut StopContext) {
        let gate = Arc::clone(&self.gate);
        let owners = Arc::clone(&self.owners);
        let applier = Arc::clone(&self.applier);
        let rules = self.rules.clone();
        let is_unseen = context.was_never_visible;
        context.run_backing_work(move || {
            owners.stop();
            if let Some(rules) = &rules {
                rules.stop();
            }
            // No program has made a transaction, and those of an earlier firnd stay for the next one.
            if is_unseen {
                return;
            }
            if let Some(rules) = &rules {
                rules.finish();
            }
            end_transactions(&gate);
            applier.stop();
            refuse_changes_after_decided_commits(&gate);
        });
    }
}

/// Starts the threads of the commit rules: one watches the exits of writers, another commits with other hosts.
fn start_rule_threads(rules: &Arc<CommitRules>) -> Result<(), MountError> {
    let exit_rules = Arc::clone(rules);
    spawn_thread("firn-exits", move || exit_rules.watch_exits())
        .map_err(MountError::io("start the thread that watches writers"))?;
    if rules.has_other_hosts() {
        let host_rules = Arc::clone(rules);
        spawn_thread("firn-rule-hosts", move || host_rules.run_joint_commits()).map_err(
            MountError::io("start the thread that commits with other hosts"),
        )?;
    }
    Ok(())
}

/// Lets the thread that watches owners read and abort transactions.
struct GateScopes {
    gate: Arc<TransactionGate>,
    invalidate_cache: InvalidateCache,
}

impl ScopeActions for GateScopes {
    fn is_open(&self, scope: &[u8]) -> Option<bool> {
        is_open(&self.gate, scope)
    }

    fn abort(&self, scope: &[u8]) -> Result<(), String> {
        abort_orphan(&self.gate, scope, &*self.invalidate_cache)
    }
}
