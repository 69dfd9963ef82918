//! The main loop of `firn top`: it reads keys and answers, changes the view (what is shown), and draws it on the
//! terminal.
//!
//! The terminal is restored at the end, also after a panic, and after a signal that asks the process to end.

use std::io::IsTerminal;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use firn_client::ClientError;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::sampler::{Sampler, TopRequest};
use super::screen::draw;
use super::{Checkpoints, JobView, Pane, Rates, View};
use crate::failure::{DONE, FAILED, Failure, USAGE};

/// Interval at which the loop checks for a signal that asks the process to end.
const SIGNAL_CHECK_INTERVAL: Duration = Duration::from_millis(250);
/// Samples that arrive within this time of each other are drawn together, once.
const REDRAW_DELAY: Duration = Duration::from_millis(20);
/// Rows that PgUp and PgDn move.
const PAGE_ROWS: isize = 10;
/// Timeout for the answers that a printed screen (`--once`) shows.
const ONCE_TIMEOUT: Duration = Duration::from_secs(3);

/// Returns the failure for an error of the terminal.
fn terminal_failure(error: std::io::Error) -> Failure {
    Failure::new(FAILED, format!("the terminal cannot be used: {error}"))
}

/// Returns a view without answers.
fn loading_view(request: &TopRequest, shows_job: bool, has_colour: bool) -> View {
    View {
        host: crate::text::own_host_name(),
        interval_s: request.interval.as_secs_f64(),
        has_colour,
        job: shows_job.then(unanswered_job),
        ..View::default()
    }
}

/// Returns a job without an answer.
fn unanswered_job() -> JobView {
    JobView {
        answer: None,
        rates: Rates::default(),
    }
}

/// An event for the loop of the screen.
enum ScreenEvent {
    /// A sampler thread has a new answer.
    NewAnswer,
    /// The user typed a key, or the terminal changed its size.
    Terminal(Event),
    /// The terminal is gone: reading from it failed.
    Closed,
}

/// Shows the screen until the user ends it. Returns the exit status, or a failure if the terminal cannot be used.
pub fn show_screen(request: TopRequest, shows_job: bool, has_colour: bool) -> Result<u8, Failure> {
    let has_terminal = std::io::stdout().is_terminal() && std::io::stdin().is_terminal();
    let can_draw = std::env::var_os("TERM").is_none_or(|term| term != "dumb");
    if !has_terminal || !can_draw {
        return Err(Failure::new(
            USAGE,
            "`firn top` needs a terminal: `firn top --once` prints one screen, `firn status --watch` lines without end, \
             `firn status --json` is for scripts",
        ));
    }
    let is_stopped = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&is_stopped)).map_err(terminal_failure)?;
    }
    let (event_sender, events) = mpsc::channel();
    let updates = start_update_thread(&event_sender)?;
    let sampler = Sampler::start(request.clone(), shows_job, &updates).map_err(terminal_failure)?;
    // The sampler has its own senders. The update thread ends with the last of them.
    drop(updates);
    let mut view = loading_view(&request, shows_job, has_colour);
    // `try_init` installs a panic hook that restores the terminal before the panic's message is printed.
    let mut terminal = ratatui::try_init().map_err(terminal_failure)?;
    let result = start_key_thread(event_sender).and_then(|()| {
        run_event_loop(&mut view, &sampler, &events, &is_stopped, &mut |view| {
            terminal.draw(|frame| draw(frame, view)).map(drop)
        })
    });
    ratatui::try_restore().map_err(terminal_failure)?;
    result.map_err(terminal_failure).map(|()| DONE)
}

/// Starts a thread that turns the messages of sampler threads into events. Returns the sender for these messages.
///
/// Messages that arrive within [`REDRAW_DELAY`] become one event, so that the screen is drawn once for them.
fn start_update_thread(event_sender: &Sender<ScreenEvent>) -> Result<Sender<()>, Failure> {
    let (update_sender, update_receiver) = mpsc::channel();
    let event_sender = event_sender.clone();
    let forward_updates = move || {
        while update_receiver.recv().is_ok() {
            std::thread::sleep(REDRAW_DELAY);
            // The next event covers the messages that have arrived in the meantime.
            while update_receiver.try_recv().is_ok() {}
            if event_sender.send(ScreenEvent::NewAnswer).is_err() {
                return;
            }
        }
    };
    std::thread::Builder::new()
        .spawn(forward_updates)
        .map_err(terminal_failure)?;
    Ok(update_sender)
}

/// Starts the thread that reads keys and changes of size, and forwards each as an event.
fn start_key_thread(event_sender: Sender<ScreenEvent>) -> std::io::Result<()> {
    let forward_keys = move || {
        while let Ok(event) = event::read() {
            if event_sender.send(ScreenEvent::Terminal(event)).is_err() {
                return;
            }
        }
        // The loop of the screen may have ended already, and then needs no event.
        let _ = event_sender.send(ScreenEvent::Closed);
    };
    std::thread::Builder::new().spawn(forward_keys).map(drop)
}

/// Handles events until the user quits, a signal sets `is_stopped`, or the terminal is gone. Draws the view (what the
/// screen shows) after each event that changes it.
fn run_event_loop(
    view: &mut View,
    sampler: &Sampler,
    events: &Receiver<ScreenEvent>,
    is_stopped: &AtomicBool,
    draw: &mut dyn FnMut(&View) -> std::io::Result<()>,
) -> std::io::Result<()> {
    draw(view)?;
    while !is_stopped.load(Ordering::Relaxed) {
        match events.recv_timeout(SIGNAL_CHECK_INTERVAL) {
            Ok(ScreenEvent::NewAnswer) if view.is_paused => continue,
            Ok(ScreenEvent::NewAnswer) => sampler.copy_answers_to(view),
            Ok(ScreenEvent::Terminal(Event::Key(key))) if key.kind != KeyEventKind::Release => {
                if is_quit_key(key) {
                    return Ok(());
                }
                apply_key(view, key);
                sampler.copy_answers_to(view);
            }
            Ok(ScreenEvent::Terminal(_)) => {}
            Ok(ScreenEvent::Closed) | Err(RecvTimeoutError::Disconnected) => return Ok(()),
            Err(RecvTimeoutError::Timeout) => continue,
        }
        sampler.publish_selection(view);
        draw(view)?;
    }
    Ok(())
}

/// Returns whether a key quits `firn top`.
fn is_quit_key(key: KeyEvent) -> bool {
    let is_ctrl_c = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
    is_ctrl_c || matches!(key.code, KeyCode::Char('q' | 'Q'))
}

/// Changes the view (what the screen shows) according to a key. Keys without a meaning have no effect.
fn apply_key(view: &mut View, key: KeyEvent) {
    match key.code {
        KeyCode::Up => view.move_choice(-1),
        KeyCode::Down => view.move_choice(1),
        KeyCode::PageUp => view.move_choice(-PAGE_ROWS),
        KeyCode::PageDown => view.move_choice(PAGE_ROWS),
        KeyCode::Home => view.move_choice(isize::MIN),
        KeyCode::End => view.move_choice(isize::MAX),
        KeyCode::Tab | KeyCode::BackTab | KeyCode::Left | KeyCode::Right => {
            view.pane = match view.pane {
                Pane::Upper => Pane::Lower,
                Pane::Lower => Pane::Upper,
            };
        }
        KeyCode::Char('p' | ' ') => view.is_paused = !view.is_paused,
        KeyCode::Char('j') => {
            view.job = match view.job {
                Some(_) => None,
                None => Some(unanswered_job()),
            };
            view.upper_row = 0;
            view.lower_row = 0;
            view.selected_name = None;
        }
        KeyCode::Char('?' | 'h') => view.shows_help = !view.shows_help,
        KeyCode::Esc => view.shows_help = false,
        _ => {}
    }
}

/// Returns one screen as text for `--once`.
///
/// The text is made when everything on the screen is loaded, or at the timeout. Returns a failure if the user
/// asked for a directory that is on no mount.
pub fn render_once(
    request: TopRequest,
    shows_job: bool,
    size: (u16, u16),
) -> Result<String, Failure> {
    let (update_sender, update_receiver) = mpsc::channel();
    let mut view = loading_view(&request, shows_job, false);
    let directory = request.directory.clone();
    let sampler = Sampler::start(request, shows_job, &update_sender).map_err(terminal_failure)?;
    // Only the sampler's threads hold senders now, so the receiver notices if all of them have ended.
    drop(update_sender);
    let deadline = Instant::now() + ONCE_TIMEOUT;
    loop {
        let remaining_time = deadline.saturating_duration_since(Instant::now());
        if update_receiver.recv_timeout(remaining_time).is_err() {
            break;
        }
        sampler.copy_answers_to(&mut view);
        sampler.publish_selection(&view);
        if is_loaded(&view) {
            break;
        }
    }
    match directory {
        Some(path) if !is_mounted(&path, &view) => {
            Err(ClientError::NoMount { path, arena: None }.into())
        }
        _ => Ok(render_text(&view, size)),
    }
}

/// Returns whether a directory is on one of the mounts: its path says so, or its checkpoints are listed. The directory
/// is not opened, because its mount may hang.
fn is_mounted(path: &Path, view: &View) -> bool {
    let Ok(path) = std::path::absolute(path) else {
        return false;
    };
    if matches!(view.checkpoints, Checkpoints::Listed(_)) {
        return true;
    }
    view.mounts
        .iter()
        .any(|mount| path.starts_with(&mount.mount_point))
}

/// Returns whether everything in a view (the content of the screen) is loaded, or has failed to load: all mounts, the
/// list of checkpoints, and the job if one is shown.
fn is_loaded(view: &View) -> bool {
    let are_mounts_loaded = view
        .mounts
        .iter()
        .all(|mount| mount.status.is_some() || mount.silence.is_some());
    if !are_mounts_loaded {
        return false;
    }
    let are_checkpoints_listed = !matches!(view.checkpoints, Checkpoints::Loading);
    let Some(job) = &view.job else {
        return are_checkpoints_listed || view.mounts.is_empty();
    };
    match &job.answer {
        None => false,
        Some(Ok(_)) => are_checkpoints_listed,
        // The job is unknown, so there is no directory whose checkpoints could be listed.
        Some(Err(_)) => true,
    }
}

/// Returns a view as text of `width` columns and `height` lines, without spaces at the ends of lines.
pub fn render_text(view: &View, (width, height): (u16, u16)) -> String {
    let mut terminal =
        Terminal::new(TestBackend::new(width, height)).expect("a buffer cannot fail");
    terminal
        .draw(|frame| draw(frame, view))
        .expect("a buffer cannot fail");
    buffer_text(terminal.backend().buffer())
}

/// Returns the lines of a buffer, without spaces at their ends.
fn buffer_text(buffer: &Buffer) -> String {
    let area = buffer.area;
    let lines = (0..area.height).map(|row| {
        let cells = (0..area.width).map(|column| buffer[(column, row)].symbol());
        format!("{}\n", cells.collect::<String>().trim_end())
    });
    lines.collect()
}

#[cfg(test)]
mod tests {
    use firn_protocol::{ErrorStatus, LaneStatus, Status, TokenState, TokenStatus};

    use super::super::{Checkpoints, FirndSilence, MountView};
    use super::*;
    use crate::job::example;
    use crate::verb::history::CheckpointEntry;

    fn status(held: u64) -> Status {
        Status {
            mount_point: "/ckpt".into(),
            held_bytes: held,
            held_files: 3,
            arena_bytes: 512 << 20,
            arena_used_bytes: held + (8 << 20),
            ingest_bytes_per_second: (512 << 20) as f64,
            drain_bytes_per_second: (128 << 20) as f64,
            ..Status::default()
        }
    }

    fn mount(name: &str, status: Status) -> MountView {
        let mut rates = Rates::default();
        for step in 0..30_u32 {
            rates.push(
                status.ingest_bytes_per_second * f64::from(step) / 29.0,
                status.drain_bytes_per_second,
            );
        }
        MountView {
            mount_point: name.into(),
            status: Some(Box::new(status)),
            silence: None,
            rates,
        }
    }

    fn checkpoint(step: u64, state: &str, held: u64, durable: u64) -> CheckpointEntry {
        CheckpointEntry {
            name: format!("step_{step}").into(),
            path: format!("/ckpt/step_{step}").into(),
            step,
            bytes: 32 << 20,
            held_bytes: held << 20,
            durable_bytes: durable << 20,
            files: 8,
            whole: Some(state == "whole"),
            state: state.into(),
            level: None,
            age_seconds: 3.0,
            host: None,
        }
    }

    fn view() -> View {
        let waiting = Status {
            waiting_writers: 2,
            ..status(400 << 20)
        };
        let lane = |held: u64, token: TokenState| LaneStatus {
            held_bytes: held,
            queued_files: 2,
            writers: 1,
            token: Some(TokenStatus {
                state: token,
                state_seconds: 1.5,
                holder: (token == TokenState::Waiting).then(|| "n2".into()),
                ..TokenStatus::default()
            }),
            ..LaneStatus::default()
        };
        let laned = Status {
            lanes: vec![
                lane(9 << 20, TokenState::Held),
                lane(5 << 20, TokenState::Waiting),
            ],
            ..waiting
        };
        View {
            host: "node1".into(),
            interval_s: 1.0,
            mounts: vec![mount("/scratch/other", status(0)), mount("/ckpt", laned)],
            checkpoints: Checkpoints::Listed(vec![
                checkpoint(12, "written", 32, 0),
                checkpoint(11, "whole", 8, 0),
                checkpoint(10, "whole", 0, 0),
                checkpoint(9, "whole", 0, 32),
                checkpoint(8, "cut", 4, 16),
            ]),
            ..View::default()
        }
    }

    fn compare(name: &str, view: &View, size: (u16, u16)) {
        crate::snapshot::compare(&format!("top/{name}.txt"), &render_text(view, size));
    }

    #[test]
    fn mounts_and_checkpoints_fit_into_80_columns_and_grow_with_the_terminal() {
        compare("host", &view(), (80, 24));
        compare("host-wide", &view(), (132, 40));
        compare("host-small", &view(), (60, 16));
        compare("too-small", &view(), (30, 5));
    }

    #[test]
    fn the_mount_in_trouble_is_first_and_says_what_is_wrong() {
        let mut view = view();
        view.mounts[0].silence = Some(FirndSilence {
            error: "the firnd of /scratch/other does not answer".into(),
            seconds: 12.0,
        });
        let mut failing = status(64 << 20);
        failing.errors.push(ErrorStatus {
            path: "step_12/rank_0".into(),
            message: "write failed: No space left on device".into(),
            repeats: 3,
            ..ErrorStatus::default()
        });
        view.mounts.push(mount("/failing", failing));
        let order: Vec<&str> = view
            .ordered_mounts()
            .iter()
            .map(|one| one.mount_point.as_str())
            .collect();
        assert_eq!(order, ["/scratch/other", "/failing", "/ckpt"]);
        compare("trouble", &view, (80, 24));
        view.selected_name = Some("/failing".into());
        view.update_selected_rows();
        view.is_paused = true;
        view.pane = Pane::Lower;
        view.lower_row = 3;
        compare("trouble-second", &view, (80, 24));
    }

    #[test]
    fn without_mounts_or_checkpoints_it_says_what_to_type() {
        let empty = View {
            host: "node1".into(),
            interval_s: 1.0,
            ..View::default()
        };
        compare("no-mounts", &empty, (80, 24));
        let mut view = view();
        view.checkpoints = Checkpoints::Unknown("/ckpt did not list its files within 1.5 s".into());
        compare("no-checkpoints", &view, (80, 24));
    }

    #[test]
    fn a_job_shows_sums_and_what_to_do_about_the_chosen_host() {
        let mut rates = Rates::default();
        for step in 0..20_u32 {
            rates.push(f64::from(step) * 1e8, 2e8);
        }
        let mut view = View {
            job: Some(JobView {
                answer: Some(Ok(example())),
                rates,
            }),
            ..view()
        };
        compare("job", &view, (80, 24));
        compare("job-wide", &view, (120, 40));
        view.job = Some(JobView {
            answer: Some(Err("/scratch/run42 did not answer within 1.5 s".into())),
            rates: Rates::default(),
        });
        compare("job-unanswered", &view, (80, 24));
    }

    #[test]
    fn help_fits_into_24_lines() {
        let view = View {
            shows_help: true,
            ..view()
        };
        compare("help", &view, (80, 24));
    }

    #[test]
    fn colours_are_used_only_where_they_are_wanted() {
        let colours = |has_colour: bool| {
            let view = View {
                has_colour,
                ..view()
            };
            let mut terminal = Terminal::new(TestBackend::new(80, 24)).unwrap();
            terminal.draw(|frame| draw(frame, &view)).unwrap();
            let cells = terminal.backend().buffer().content().to_vec();
            cells
                .iter()
                .any(|cell| cell.fg != ratatui::style::Color::Reset)
        };
        assert!(colours(true) && !colours(false));
    }

    #[test]
    fn keys_choose_pause_and_end() {
        let key = |code| KeyEvent::new(code, KeyModifiers::NONE);
        let mut view = view();
        for (code, upper) in [
            (KeyCode::Down, 1),
            (KeyCode::Down, 1),
            (KeyCode::Up, 0),
            (KeyCode::End, 1),
            (KeyCode::Home, 0),
        ] {
            apply_key(&mut view, key(code));
            assert_eq!(view.upper_row, upper, "{code:?}");
        }
        apply_key(&mut view, key(KeyCode::Tab));
        apply_key(&mut view, key(KeyCode::PageDown));
        assert_eq!((view.upper_row, view.lower_row), (0, 4));
        apply_key(&mut view, key(KeyCode::Char('p')));
        assert!(view.is_paused);
        apply_key(&mut view, key(KeyCode::Char('j')));
        assert!(view.job.is_some());
        assert!(is_quit_key(key(KeyCode::Char('q'))));
        assert!(is_quit_key(KeyEvent::new(
            KeyCode::Char('c'),
            KeyModifiers::CONTROL
        )));
        assert!(!is_quit_key(key(KeyCode::Char('c'))));
    }
}
