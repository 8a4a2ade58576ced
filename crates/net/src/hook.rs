//! The user's own way to move an address: an elastic IP, a route, a DNS record.
//!
//! `--takeover-hook CMD` runs `CMD` by `/bin/sh -c` with this environment, beside the agent's own:
//!
//! | variable | meaning |
//! | --- | --- |
//! | `HOTSPARE_EVENT` | `takeover`: this host is primary now; `release`: it no longer is |
//! | `HOTSPARE_TERM` | number of the reign, grows with every takeover |
//! | `HOTSPARE_ADDRESS` | the service address without prefix; empty if there is none |
//! | `HOTSPARE_GUEST` | identifier of the guest |
//! | `HOTSPARE_INTERFACE` | the host's bridge or interface; empty if there is none |
//!
//! The guest runs on meanwhile: a hook is for the world, not for the guest. A hook that fails is
//! told with what it wrote, and not run again.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use hotspare_image::Term;
use hotspare_kernel::{HostPid, KernelError, pidfd, socket};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

/// Bytes of a hook's output that are kept for the error.
const OUTPUT_BYTES_MAX: u64 = 4096;

/// What has happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HookEvent {
    /// This host is primary now.
    Takeover,
    /// This host is no longer primary.
    Release,
}

impl HookEvent {
    /// As in `HOTSPARE_EVENT`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            HookEvent::Takeover => "takeover",
            HookEvent::Release => "release",
        }
    }
}

/// What a hook is told.
#[derive(Clone, Debug)]
pub struct HookCall<'a> {
    /// What has happened.
    pub event: HookEvent,
    /// In which reign.
    pub term: Term,
    /// The service address without prefix, or nothing.
    pub address: &'a str,
    /// The guest.
    pub guest: &'a str,
    /// The host's bridge or interface, or nothing.
    pub interface: &'a str,
}

/// Why a hook did not do its work.
#[derive(Debug, thiserror::Error)]
pub enum HookError {
    /// It could not be started.
    #[error("the takeover hook `{command}` cannot be started: {error}")]
    Start {
        /// What was given.
        command: String,
        /// What the kernel says.
        error: io::Error,
    },
    /// It says that it failed.
    #[error("the takeover hook `{command}` failed ({status}) for {event}; it said: {output}")]
    Failed {
        /// What was given.
        command: String,
        /// takeover or release.
        event: &'static str,
        /// Its exit status.
        status: ExitStatus,
        /// The beginning of its output.
        output: String,
    },
    /// It took too long and was killed with its children.
    #[error(
        "the takeover hook `{command}` was still running after {patience:?} for {event} and was \
         killed; it said: {output}"
    )]
    TooSlow {
        /// What was given.
        command: String,
        /// takeover or release.
        event: &'static str,
        /// How long it had.
        patience: Duration,
        /// The beginning of its output.
        output: String,
    },
    /// It could not be watched.
    #[error("watch the takeover hook: {0}")]
    Watch(#[from] KernelError),
}

/// Runs the hook and waits for it, at most `patience`. Blocks: call it beside the takeover, not
/// within.
pub fn run(command: &str, call: &HookCall<'_>, patience: Duration) -> Result<(), HookError> {
    let start = |error| HookError::Start { command: command.to_owned(), error };
    let mut output = tempfile::tempfile().map_err(start)?;
    let mut child = spawn(command, call, &output).map_err(start)?;
    let status = wait(&mut child, patience)?;
    let event = call.event.as_str();
    match status {
        Some(status) if status.success() => Ok(()),
        Some(status) => {
            let (command, output) = (command.to_owned(), said(&mut output));
            Err(HookError::Failed { command, event, status, output })
        }
        None => {
            let (command, output) = (command.to_owned(), said(&mut output));
            Err(HookError::TooSlow { command, event, patience, output })
        }
    }
}

fn spawn(command: &str, call: &HookCall<'_>, output: &File) -> io::Result<Child> {
    Command::new("/bin/sh")
        .args(["-c", command])
        .env("HOTSPARE_EVENT", call.event.as_str())
        .env("HOTSPARE_TERM", call.term.0.to_string())
        .env("HOTSPARE_ADDRESS", call.address)
        .env("HOTSPARE_GUEST", call.guest)
        .env("HOTSPARE_INTERFACE", call.interface)
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output.try_clone()?)
        // A group of its own, so that what it starts can be killed with it.
        .process_group(0)
        .spawn()
}

/// Its status; `None` if it had to be killed.
fn wait(child: &mut Child, patience: Duration) -> Result<Option<ExitStatus>, HookError> {
    let reap = |child: &mut Child| child.wait().map_err(KernelError::io("wait for the hook"));
    let pid = child.id() as i32;
    let handle = pidfd::open(HostPid(pid))?;
    let patience_ms = i32::try_from(patience.as_millis()).unwrap_or(i32::MAX);
    let ended = socket::poll_for(handle.as_fd(), libc::POLLIN, patience_ms)?;
    if ended & libc::POLLIN != 0 {
        return Ok(Some(reap(child)?));
    }
    // Fails only if it has ended this instant.
    let _ = killpg(Pid::from_raw(pid), Signal::SIGKILL);
    reap(child)?;
    Ok(None)
}

fn said(output: &mut File) -> String {
    let mut bytes = Vec::new();
    let read = output
        .seek(SeekFrom::Start(0))
        .and_then(|_| output.take(OUTPUT_BYTES_MAX).read_to_end(&mut bytes));
    match read {
        Ok(0) => "nothing".to_owned(),
        Ok(_) => String::from_utf8_lossy(&bytes).trim().to_owned(),
        Err(error) => format!("(its output cannot be read: {error})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CALL: HookCall<'_> = HookCall {
        event: HookEvent::Takeover,
        term: Term(7),
        address: "10.0.0.50",
        guest: "g1",
        interface: "br0",
    };

    #[test]
    fn a_hook_sees_the_documented_environment() {
        let all = "$HOTSPARE_EVENT $HOTSPARE_TERM $HOTSPARE_ADDRESS $HOTSPARE_GUEST \
                   $HOTSPARE_INTERFACE";
        let command = format!("test \"{all}\" = 'takeover 7 10.0.0.50 g1 br0'");
        run(&command, &CALL, Duration::from_secs(60)).unwrap();
    }

    #[test]
    fn a_hook_that_fails_is_quoted() {
        let error = run("echo no such route >&2; exit 3", &CALL, Duration::from_secs(60));
        let text = error.unwrap_err().to_string();
        assert!(text.contains("exit status: 3") && text.ends_with("no such route"), "{text}");
    }

    #[test]
    fn a_hook_that_hangs_is_killed_with_its_children() {
        let error = run("echo started; sleep 1000 | sleep 1000", &CALL, Duration::from_millis(50));
        assert!(matches!(error, Err(HookError::TooSlow { .. })), "{error:?}");
    }
}
