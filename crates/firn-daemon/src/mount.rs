//! `firn mount`: makes a usable mount of a request. The main function of firnd is here, too.

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
/// `notice`.
pub fn mount_with_notices(
    request: MountRequest,
    notice: &mut dyn FnMut(String),
) -> Result<(), MountError> {
    if !request.foreground {
        return spawn(&request, notice);
    }
    process::prepare();
    log::start(&request.options);
    let handover = if request.options.takeover == Takeover::Auto {
        let found = KeeperHandover::from_service_manager();
        found.map_err(MountError::io("reach the service manager (NOTIFY_SOCKET)"))?
    } else {
        None
    };
    if handover.is_some() {
        process::abort_on_panic();
    }
    firnd::serve(&request, Reporter::Foreground(notice), handover)
}

/// The main function of firnd. stdin is the request, or a socket to the keeper that has the request; stdout is the pipe
/// to `firn mount`.
pub fn firnd_main() -> ExitCode {
    // Without this, ps, top and pgrep would show the name of the link by which the program was started.
    let _ = rustix::thread::set_name(c"firnd");
    // A Ctrl-C for the programs of the terminal must not end the mount. The call fails for the leader of a process
    // group, which has no terminal to lose.
    let _ = rustix::process::setsid();
    process::prepare();
    let Ok(mut pipe) = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdout(), 3).map(File::from)
    else {
        return ExitCode::FAILURE;
    };
    let is_kept = std::env::args_os().nth(1).is_some_and(|word| word == KEPT);
    let result = pipe
        .try_clone()
        .map_err(MountError::io("keep the pipe"))
        .and_then(|reporter| {
            process::abort_on_panic();
            if !is_kept {
                let request = read_request(std::io::stdin())?;
                return firnd::serve(&request, Reporter::Pipe(reporter), None);
            }
            let handover = KeeperHandover::receive()
                .map_err(MountError::io("receive the messages of the keeper"))?;
            let file = handover.link.request();
            let file = file.map_err(MountError::io("read the request"))?;
            let request = read_request(File::from(file))?.with_changes()?;
            firnd::serve(&request, Reporter::Pipe(reporter), Some(handover))
        });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error}");
            report_failure(&mut pipe, &error);
            ExitCode::from(error.exit_code())
        }
    }
}

fn read_request(mut from: impl Read) -> Result<MountRequest, MountError> {
    let mut json = Vec::new();
    from.read_to_end(&mut json)
        .map_err(MountError::io("read the request"))?;
    serde_json::from_slice(&json).map_err(|error| MountError::Reported {
        text: format!("firnd must be started by `firn mount`: {error}"),
        code: 2,
    })
}
