//! Faults that come alone: they strike when the guest is protected, and each proves that it has.

use std::time::Duration;

use hotspare_kernel::kill_point::{KillPoint, Role};
use nix::sys::signal::Signal;

use super::{Place, Strike, What};
use crate::Host;
use crate::campaign::agents::Agents;
use crate::clock::Instant;
use crate::lab::LabError;
use crate::protected::HANG;

/// How to take it back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Undo {
    Nothing,
    Continue(usize),
    Thaw(usize),
    Heal,
    StartArbiter,
}

/// A blow that has struck.
pub(super) struct Struck {
    pub(super) at: Instant,
    pub(super) undo: Undo,
    /// What was seen of it: proof that it was none in name only.
    pub(super) proof: String,
}

fn wanted(what: &str) -> LabError {
    LabError::Deadline { what: what.to_owned(), waited: Duration::ZERO }
}

fn index(agents: &Agents, place: Place) -> Result<usize, LabError> {
    let primary = agents.primary().ok_or_else(|| wanted("a primary"))?;
    match place {
        Place::Spare => agents.spare(primary).ok_or_else(|| wanted("a spare")),
        Place::Arbiter => Ok(agents.count()),
        Place::Primary | Place::Either | Place::All => Ok(primary),
    }
}

/// Strikes, and sees that it did.
pub(super) fn strike(strike: &Strike, agents: &mut Agents) -> Result<Struck, LabError> {
    let index = index(agents, strike.to)?;
    let name = agents.lab.host(index).name().to_owned();
    let at = Instant::now();
    let struck = |at, undo, proof| Ok(Struck { at, undo, proof });
    match strike.what {
        What::KillHost => {
            let at = agents.kill_host(index)?;
            ended(agents, index, &format!("{name} has no process left"))
                .and_then(|proof| struck(at, Undo::Nothing, proof))
        }
        What::KillPrograms => {
            agents.kill_processes(index)?;
            ended(agents, index, &format!("{name} has no process left"))
                .and_then(|proof| struck(at, Undo::Nothing, proof))
        }
        What::KillAgent => {
            agents.kill_agent(index)?;
            ended(agents, index, &format!("the agent on {name} ended"))
                .and_then(|proof| struck(at, Undo::Nothing, proof))
        }
        What::KillGuest => {
            let pids = agents.kill_guest(index)?;
            pids.iter().try_for_each(|pid| gone(*pid))?;
            let count = pids.len();
            struck(at, Undo::Nothing, format!("its {count} processes on {name} are gone"))
        }
        What::Stop => {
            agents.agent(index).signal(Signal::SIGSTOP)?;
            let pid = agents.agent(index).pid();
            until(|| state(pid) == Some('T'), "a stopped agent")?;
            struck(at, Undo::Continue(index), format!("agent {pid} on {name} in state T"))
        }
        What::Freeze => {
            agents.lab.host(index).freeze()?;
            struck(at, Undo::Thaw(index), format!("all of {name} stands still"))
        }
        What::Cut { to, both } => {
            let other = self::index(agents, to)?;
            let (from, to): (&Host, &Host) = (agents.lab.host(index), agents.lab.host(other));
            agents.lab.cut(from, to)?;
            if both {
                agents.lab.cut(to, from)?;
            }
            // How many frames were dropped is known when it is mended.
            struck(at, Undo::Heal, String::new())
        }
        What::KillPoint(point) => {
            let at = die_at(point, agents)?;
            struck(at, Undo::Nothing, format!("it was reached: {}", point.name()))
        }
        What::KillArbiter => {
            agents.kill_arbiter();
            struck(at, Undo::StartArbiter, "etcd has ended".to_owned())
        }
        What::Wire(_) | What::SlowDisk(_) | What::FullDisk | What::Memory => {
            Err(wanted("a blow, not weather"))
        }
    }
}

/// Has an agent die at this point, and waits until it has.
fn die_at(point: KillPoint, agents: &mut Agents) -> Result<Instant, LabError> {
    let (primary, spare) = (index(agents, Place::Primary)?, index(agents, Place::Spare)?);
    let before = agents.reached();
    let mut at = Instant::now();
    match point.role() {
        Role::Primary => agents.arm(primary, point)?,
        Role::Spare => agents.arm(spare, point)?,
        Role::Join => {
            agents.arm(spare, point)?;
            agents.kill_agent(spare)?;
            until(|| agents.agent(spare).try_wait().is_some(), "the end of a spare's agent")?;
            // Who dies before it listens is not protection; it has reached the point all the same.
            if let Err(what) = agents.protect()
                && agents.reached() == before
            {
                return Err(LabError::Deadline { what, waited: HANG });
            }
        }
        Role::Takeover => {
            // Whoever of them takes over.
            for index in (0..agents.count()).filter(|index| *index != primary) {
                agents.arm(index, point)?;
            }
            at = agents.kill_host(primary)?;
        }
    }
    let reached = until(|| agents.reached() > before, &format!("kill point {}", point.name()));
    (0..agents.count()).for_each(|index| agents.disarm(index));
    reached?;
    // Whether it was the first thing that happened or the last of several.
    Ok(if point.role() == Role::Primary { Instant::now() } else { at })
}

/// Takes it back; what that has shown.
pub(super) fn undo(undo: Undo, agents: &mut Agents) -> Result<String, LabError> {
    match undo {
        Undo::Nothing => {}
        Undo::Continue(index) => agents.agent(index).signal(Signal::SIGCONT)?,
        Undo::Thaw(index) => agents.host(index).thaw()?,
        Undo::StartArbiter => agents.start_arbiter(),
        Undo::Heal => {
            let frames = agents.lab.heal()?;
            return Ok(if frames > 0 { format!("{frames} frames dropped") } else { String::new() });
        }
    }
    Ok(String::new())
}

fn ended(agents: &Agents, index: usize, words: &str) -> Result<String, LabError> {
    until(|| agents.agent(index).try_wait().is_some(), words)?;
    Ok(words.to_owned())
}

fn gone(pid: i32) -> Result<(), LabError> {
    until(|| matches!(state(pid), None | Some('Z' | 'X')), "the end of the guest's processes")
}

/// The state of a process: the third field of `/proc/PID/stat` (proc(5)).
fn state(pid: i32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

fn until(mut is_so: impl FnMut() -> bool, what: &str) -> Result<(), LabError> {
    let deadline = Instant::now() + HANG;
    while !is_so() {
        if Instant::now() > deadline {
            return Err(LabError::Deadline { what: what.to_owned(), waited: HANG });
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}
