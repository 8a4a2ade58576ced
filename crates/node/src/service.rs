//! What systemd wants to know (sd_notify(3)): that we are ready, how things stand, that we live.
//!
//! The watchdog is fed only as long as the thread that owns the guest answers: it is asked through
//! its mailbox, as everybody asks it. A spare that takes in a first copy, which is as large as the
//! guest, cannot answer for so long; then it counts that the copy grows.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hotspare_replica::HostRole;

use crate::agent::{Agent, Message};

/// How often the status is looked at.
const LOOK: Duration = Duration::from_secs(1);

/// The way to the service manager.
pub struct Manager {
    socket: UnixDatagram,
    to: SocketAddr,
}

impl Manager {
    /// The manager that started this program, if it wants to hear from it.
    pub fn from_environment() -> Option<Self> {
        let name = std::env::var_os("NOTIFY_SOCKET")?;
        let to = match name.as_bytes() {
            [b'@', rest @ ..] => SocketAddr::from_abstract_name(rest).ok()?,
            _ => SocketAddr::from_pathname(&name).ok()?,
        };
        Some(Self { socket: UnixDatagram::unbound().ok()?, to })
    }

    /// Tells it something. One that does not listen does not care.
    pub fn tell(&self, what: &str) {
        let _ = self.socket.send_to_addr(what.as_bytes(), &self.to);
    }
}

/// How often the manager wants a sign of life from this process, if it does.
fn watchdog() -> Option<Duration> {
    let number = |name| std::env::var(name).ok()?.parse::<u64>().ok();
    let for_us = number("WATCHDOG_PID").is_none_or(|pid| pid == u64::from(std::process::id()));
    number("WATCHDOG_USEC").filter(|us| for_us && *us > 0).map(Duration::from_micros)
}

/// Tells the manager, if there is one, that the agent is ready, and from then on how it does.
pub fn report(agent: &Agent) -> std::io::Result<()> {
    let Some(manager) = Manager::from_environment() else { return Ok(()) };
    let (agent, watchdog) = (agent.clone(), watchdog());
    let mut told = agent.words();
    manager.tell(&format!("READY=1\nSTATUS={told}"));
    let tell = move || {
        let pause = watchdog.map_or(LOOK, |every| (every / 3).min(LOOK));
        let mut asked: Option<Arc<AtomicBool>> = None;
        let mut seen = agent.meters.progress.get();
        loop {
            std::thread::sleep(pause);
            let words = agent.words();
            if words != told {
                manager.tell(&format!("STATUS={words}"));
                told = words;
            }
            let answered = asked.as_ref().is_none_or(|answer| answer.load(Ordering::Relaxed));
            let progress = agent.meters.progress.get();
            let goes_on = std::mem::replace(&mut seen, progress) != progress;
            if watchdog.is_some() && (goes_on || answered && asked.is_some()) {
                manager.tell("WATCHDOG=1");
            }
            if watchdog.is_none() || !answered {
                continue;
            }
            let answer = Arc::new(AtomicBool::new(false));
            agent.owner.send(Message::Alive(answer.clone()));
            asked = Some(answer);
        }
    };
    std::thread::Builder::new().name("service".into()).spawn(tell).map(drop)
}

impl Agent {
    /// How things stand, in a line.
    fn words(&self) -> String {
        let face = self.face();
        let guest = face.settings.as_ref().map_or("a guest", |settings| &settings.guest);
        match face.role {
            HostRole::Primary if face.paused => {
                format!("primary of {guest}, term {}, PROTECTION PAUSED by hand", face.term.0)
            }
            HostRole::Primary if face.ready > 0 => format!(
                "primary of {guest}, term {}, protected by {} of {} spares",
                face.term.0, face.ready, face.spares
            ),
            HostRole::Primary => format!("primary of {guest}, term {}, UNPROTECTED", face.term.0),
            HostRole::Spare if face.epoch > 0 => {
                format!("spare with a ghost, term {}", face.term.0)
            }
            HostRole::Spare => "spare, waiting for a primary".to_owned(),
        }
    }
}
