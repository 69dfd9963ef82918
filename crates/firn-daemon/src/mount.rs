//! `firn mount`: makes a usable mount of a request. The main function of firnd, the process that serves the mount, is
//! here, too.

use std::fs::File;
use std::io::Read;
use std::process::ExitCode;

use firn_config::Takeover;

use crate::error::MountError;
use crate::firnd;
use crate::keeper::{KEPT, KeeperHandover};
use crate::log;
use crate::mount_request::MountRequest;
use crate::process;
use crate::spawn::{Reporter, report_failure, spawn};

/// Mounts. In the background it returns when the mount is usable, in the foreground when the mount has ended.
///
/// If the backing has an arena with data, that arena is attached and drained. Messages for the user go to stderr.
pub fn mount(request: MountRequest) -> Result<(), MountError> {
    mount_with_notices(request, &mut |text| eprintln!("firn: {text}"))
}

/// Mounts as [`mount`] does, but passes each message for the user (recovered data, a dead mount that was removed) to
/// `notice`. In the background, another process serves the mount; in the foreground, this one does.
pub fn mount_with_notices(
    request: MountRequest,
    notice: &mut dyn FnMut(String),
) -> Result<(), MountError> {
    if !request.foreground {
        return spawn(&request, notice);
    }
    process::prepare();
    log::start(&request.options);
    let handover = match request.options.takeover {
        Takeover::Auto => KeeperHandover::from_service_manager()
            .map_err(MountError::io("reach the service manager (NOTIFY_SOCKET)"))?,
        Takeover::No => None,
    };
    if handover.is_some() {
        // Another process can continue the mount only if this one ends, even after a panic.
        process::abort_on_panic();
    }
    firnd::serve(&request, Reporter::Foreground(notice), handover)
}

/// The main function of firnd, the process that serves a mount. stdin is the request, or a socket to the keeper, which
/// has the request and starts the next firnd when one dies. stdout is the pipe to `firn mount`.
pub fn firnd_main() -> ExitCode {
    // Without this, ps, top and pgrep would show the name of the link by which the program was started.
    let _ = rustix::thread::set_name(c"firnd");
    // A Ctrl-C for the programs of the terminal must not end the mount. The call fails for the leader of a process
    // group, which has no terminal to lose.
    let _ = rustix::process::setsid();
    process::prepare();
    let Ok(pipe) = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdout(), 3) else {
        return ExitCode::FAILURE;
    };
    let mut pipe = File::from(pipe);
    let result = match pipe.try_clone() {
        Ok(reporter_pipe) => serve_request(Reporter::Pipe(reporter_pipe)),
        Err(error) => Err(MountError::io("keep the pipe")(error)),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error}");
            report_failure(&mut pipe, &error);
            ExitCode::from(error.exit_code())
        }
    }
}

/// Reads the request of `firn mount` from stdin, or gets it from the keeper, the process that starts the next firnd
/// when one dies. Then serves the mount until its end.
fn serve_request(reporter: Reporter<'_>) -> Result<(), MountError> {
    process::abort_on_panic();
    let has_keeper = std::env::args_os()
        .nth(1)
        .is_some_and(|argument| argument == KEPT);
    if !has_keeper {
        let request = read_request(std::io::stdin())?;
        return firnd::serve(&request, reporter, None);
    }
    let handover =
        KeeperHandover::receive().map_err(MountError::io("receive the messages of the keeper"))?;
    let request_file = handover
        .link
        .request()
        .map_err(MountError::io("read the request"))?;
    let request = read_request(File::from(request_file))?.with_changes()?;
    firnd::serve(&request, reporter, Some(handover))
}

/// Reads a request, which is JSON. Fails if firnd was not started by `firn mount`.
fn read_request(mut input: impl Read) -> Result<MountRequest, MountError> {
    let mut json = Vec::new();
    input
        .read_to_end(&mut json)
        .map_err(MountError::io("read the request"))?;
    serde_json::from_slice(&json).map_err(|error| MountError::Reported {
        text: format!("firnd must be started by `firn mount`: {error}"),
        code: 2,
    })
}
