//! The ghost's process tree: the same numbers, parents, groups and sessions.
//!
//! Parent and session of a process are decided when it is cloned (clone(2), setsid(2)), so the
//! order is what matters. A process whose session is not its parent's current one was cloned
//! before its parent made a session of its own, or its first parent has ended; here it is cloned
//! by a sibling in the right session (`CLONE_PARENT`), or by a helper that stands in for a leader
//! that has ended.

use std::collections::{BTreeMap, BTreeSet};

use hotspare_image::memory::{AddressSpace, Mapping};
use hotspare_image::tree::{GuestPid, Process, ProcessState, Thread};
use hotspare_image::{Checkpoint, memory::MmId};
use hotspare_kernel::ptrace::{self, HostPid, Stop, Waited, Whose};
use hotspare_kernel::spawn::CloneArgs;

use super::Ghost;
use super::body::{Body, Place, TOOLS};
use super::error::{GhostError, GhostResult};
use super::hands::{ALL_BUT_TRAP, await_end, settle_after_exec, unexpected};

/// Our init, the parent of what has no other.
pub(super) const INIT: GuestPid = GuestPid(1);

/// Init's session, whichever way the image names it.
fn plain(session: GuestPid) -> GuestPid {
    if session.0 == 0 { INIT } else { session }
}

/// Who clones a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Maker {
    Init,
    Parent(GuestPid),
    Sibling(GuestPid),
}

/// Layouts by address space, so that a new process knows where not to put the stub.
type Targets<'a> = BTreeMap<MmId, &'a [Mapping]>;

fn target_of<'a>(process: &Process, targets: &Targets<'a>) -> &'a [Mapping] {
    match &process.state {
        ProcessState::Alive(live) => targets.get(&live.mm).copied().unwrap_or(&[]),
        ProcessState::Zombie { .. } => &[],
    }
}

impl Ghost {
    /// Makes the tree that of `checkpoint`: processes, groups, sessions, threads.
    pub(super) fn sync_tree(&mut self, checkpoint: &Checkpoint) -> GhostResult<()> {
        let targets: Targets<'_> =
            checkpoint.spaces.iter().map(|space| (space.id, &space.mappings[..])).collect();
        check_tree(checkpoint)?;
        self.remove_gone(checkpoint)?;
        self.set_subreapers(checkpoint)?;
        self.check_parents(checkpoint)?;
        self.create_missing(checkpoint, &targets)?;
        self.set_groups(checkpoint)?;
        for (pid, live) in super::living(checkpoint) {
            let space = super::space(checkpoint, live.mm)?;
            self.empty_if_new(pid, space).map_err(GhostError::at(pid))?;
            self.sync_threads(pid, &live.threads).map_err(GhostError::at(pid))?;
        }
        Ok(())
    }

    /// A process that executed another program starts from an empty address space.
    fn empty_if_new(&mut self, pid: GuestPid, space: &AddressSpace) -> GhostResult<()> {
        if !self.bodies.get(&pid).is_some_and(|body| self.is_new_space(body, space)) {
            return Ok(());
        }
        let Some(body) = self.bodies.get_mut(&pid) else { return Ok(()) };
        for (_, host) in body.threads.drain(1..) {
            body.hands.end(host, libc::SYS_exit, 0)?;
        }
        body.empty(&space.mappings)
    }

    pub(super) fn set_subreapers(&mut self, checkpoint: &Checkpoint) -> GhostResult<()> {
        for process in &checkpoint.processes {
            let ProcessState::Alive(live) = &process.state else { continue };
            let Some(body) = self.bodies.get_mut(&process.pid) else { continue };
            if body.subreaper != live.child_subreaper && !body.zombie {
                body.set_subreaper(live.child_subreaper)?;
            }
        }
        Ok(())
    }

    /// Ends what the guest has no more, and reaps it as the guest did; and what it has as zombies,
    /// if that leaves children behind.
    fn remove_gone(&mut self, checkpoint: &Checkpoint) -> GhostResult<()> {
        let wanted: BTreeMap<_, _> =
            checkpoint.processes.iter().map(|process| (process.pid, process)).collect();
        let mut ending: Vec<(usize, GuestPid)> = self
            .bodies
            .values()
            .filter(|body| match wanted.get(&body.pid).map(|process| &process.state) {
                None => true,
                // A number that was used again.
                Some(ProcessState::Alive(_)) => body.zombie,
                Some(ProcessState::Zombie { .. }) => !body.zombie,
            })
            .map(|body| (self.ancestors(body.pid).count(), body.pid))
            .collect();
        // As at nearly every checkpoint: init need not be asked.
        if ending.is_empty() {
            return Ok(());
        }
        // Children before parents: whoever is to reap them is still there.
        ending.sort_by_key(|(depth, pid)| (std::cmp::Reverse(*depth), *pid));
        for (_, pid) in ending {
            let orphan = self.bodies.values().find(|body| body.parent == pid);
            let adopter = orphan.and_then(|body| Some(wanted.get(&body.pid)?.parent));
            if let Some(adopter) = adopter {
                self.leave_orphans_to(pid, adopter)?;
            }
            match wanted.get(&pid).map(|process| &process.state) {
                Some(ProcessState::Zombie { wait_status, name }) => {
                    // The others have time until the memory is there.
                    if adopter.is_some() {
                        self.end_zombie(pid, *wait_status, name)?;
                    }
                }
                _ => self.end_and_reap(pid)?,
            }
            for body in self.bodies.values_mut().filter(|body| body.parent == pid) {
                body.parent = adopter.unwrap_or(INIT);
            }
        }
        self.init().reap()?;
        Ok(())
    }

    /// Parent, its parent and so on, without init.
    fn ancestors(&self, pid: GuestPid) -> impl Iterator<Item = GuestPid> + '_ {
        let parent = |pid: &GuestPid| Some(self.bodies.get(pid)?.parent);
        let parents = std::iter::successors(parent(&pid), move |pid| parent(pid));
        parents.take_while(|pid| *pid != INIT).take(self.bodies.len())
    }

    /// Lets the kernel give the children of `dying` to `adopter`: to the nearest ancestor that is
    /// a subreaper (prctl(2)). Who was one when the guest's process died cannot be known: it may
    /// have become one since, or be none any more.
    fn leave_orphans_to(&mut self, dying: GuestPid, adopter: GuestPid) -> GhostResult<()> {
        let ancestors: Vec<GuestPid> = self.ancestors(dying).collect();
        for pid in ancestors {
            let Some(body) = self.bodies.get_mut(&pid).filter(|body| !body.zombie) else {
                continue;
            };
            let adopts = pid == adopter;
            if body.subreaper != adopts {
                body.set_subreaper(adopts)?;
            }
            if adopts {
                break;
            }
        }
        Ok(())
    }

    fn end_and_reap(&mut self, pid: GuestPid) -> GhostResult<()> {
        let Some(body) = self.bodies.remove(&pid) else { return Ok(()) };
        if !body.zombie {
            kill(&body)?;
        }
        if let Some(parent) = self.bodies.get(&body.parent).filter(|parent| !parent.zombie) {
            let wall = libc::__WALL as u64;
            // Nothing is left to reap where the parent ignores SIGCHLD.
            let mut batch = parent.batch();
            batch.may(libc::SYS_wait4, &[pid.0 as u64, 0, wall, 0]);
            batch.run()?;
        }
        Ok(())
    }

    /// Processes whose parent ended have been given another by the kernel.
    fn check_parents(&mut self, checkpoint: &Checkpoint) -> GhostResult<()> {
        for process in &checkpoint.processes {
            let Some(body) = self.bodies.get(&process.pid) else { continue };
            if body.parent == process.parent {
                continue;
            }
            let actual = self.parent_of(body.host)?;
            if actual != Some(process.parent) {
                let what = format!("process {} has parent {actual:?}", process.pid.0);
                return Err(GhostError::Rebuild(what));
            }
            if let Some(body) = self.bodies.get_mut(&process.pid) {
                body.parent = process.parent;
            }
        }
        Ok(())
    }

    fn parent_of(&self, host: HostPid) -> GhostResult<Option<GuestPid>> {
        let path = format!("/proc/{host}/status");
        let text = std::fs::read_to_string(path).map_err(GhostError::io("read ghost status"))?;
        let parent = text
            .lines()
            .find_map(|line| line.strip_prefix("PPid:")?.trim().parse().ok())
            .map(HostPid);
        if parent == Some(self.init().host_pid()) {
            return Ok(Some(INIT));
        }
        Ok(self.bodies.values().find(|body| Some(body.host) == parent).map(|body| body.pid))
    }

    /// Clones what is missing, in an order in which each inherits its session.
    fn create_missing(
        &mut self,
        checkpoint: &Checkpoint,
        targets: &Targets<'_>,
    ) -> GhostResult<()> {
        let mut missing: Vec<&Process> = checkpoint
            .processes
            .iter()
            .filter(|process| !self.bodies.contains_key(&process.pid))
            .collect();
        loop {
            let before = missing.len();
            let mut waiting = Vec::new();
            for process in missing {
                match self.maker(process) {
                    Some(maker) => {
                        self.create(process, maker, target_of(process, targets))
                            .map_err(GhostError::at(process.pid))?;
                        // A leader of a session that nobody has to inherit from its parent first.
                        if process.session == process.pid {
                            self.lead_when_ready(checkpoint, process.pid)?;
                        }
                    }
                    None => waiting.push(process),
                }
            }
            let progress = waiting.len() < before;
            missing = waiting;
            let led = self.lead_sessions(checkpoint, &missing)?;
            if missing.is_empty() {
                return Ok(());
            }
            if !progress && !led {
                let stuck = missing[0];
                self.create_by_helper(stuck, target_of(stuck, targets))?;
                missing.remove(0);
            }
        }
    }

    fn session_now(&self, pid: GuestPid) -> Option<GuestPid> {
        if pid == INIT {
            return Some(INIT);
        }
        self.bodies.get(&pid).filter(|body| !body.zombie).map(|body| body.session)
    }

    fn maker(&self, process: &Process) -> Option<Maker> {
        let session = plain(process.session);
        let inherited = self.session_now(process.parent)?;
        if session == process.pid || session == inherited {
            return Some(match process.parent {
                INIT => Maker::Init,
                parent => Maker::Parent(parent),
            });
        }
        self.bodies
            .values()
            .find(|body| !body.zombie && body.session == session && body.parent == process.parent)
            .map(|body| Maker::Sibling(body.pid))
    }

    /// Makes `pid` a session leader unless a child still to come needs its present session.
    fn lead_when_ready(&mut self, checkpoint: &Checkpoint, pid: GuestPid) -> GhostResult<()> {
        let Some(now) = self.session_now(pid) else { return Ok(()) };
        let needed = checkpoint.processes.iter().any(|process| {
            process.parent == pid
                && plain(process.session) == now
                && !self.bodies.contains_key(&process.pid)
        });
        if now == pid || needed {
            return Ok(());
        }
        let Some(body) = self.bodies.get_mut(&pid) else { return Ok(()) };
        body.batch().ask("make session", libc::SYS_setsid, &[])?;
        body.session = pid;
        body.group = pid;
        Ok(())
    }

    /// `setsid` wherever it is due. Says whether it was anywhere.
    fn lead_sessions(
        &mut self,
        checkpoint: &Checkpoint,
        missing: &[&Process],
    ) -> GhostResult<bool> {
        let mut led = false;
        for process in &checkpoint.processes {
            let pid = process.pid;
            let due = process.session == pid && !missing.iter().any(|other| other.pid == pid);
            if due && self.session_now(pid).is_some_and(|now| now != pid) {
                self.lead_when_ready(checkpoint, pid)?;
                led |= self.session_now(pid) == Some(pid);
            }
        }
        Ok(led)
    }

    /// A process in a session whose leader has ended: a helper leads the session, clones the
    /// process as its sibling and ends.
    fn create_by_helper(&mut self, process: &Process, target: &[Mapping]) -> GhostResult<()> {
        let session = plain(process.session);
        let taken = self.bodies.contains_key(&session) || session == INIT;
        if taken || self.session_now(process.parent).is_none() {
            let what = format!("session {} of process {}", session.0, process.pid.0);
            return Err(GhostError::refused(what, "its leader is neither parent nor sibling"));
        }
        let stand_in = Process {
            pid: session,
            parent: process.parent,
            group: session,
            session,
            state: ProcessState::Zombie { wait_status: 0, name: String::new() },
            exit_signal: libc::SIGCHLD,
        };
        let maker = match process.parent {
            INIT => Maker::Init,
            parent => Maker::Parent(parent),
        };
        self.create(&stand_in, maker, &[])?;
        if let Some(body) = self.bodies.get_mut(&session) {
            body.batch().ask("make session", libc::SYS_setsid, &[])?;
            body.session = session;
            body.group = session;
        }
        self.create(process, Maker::Sibling(session), target)?;
        self.dismiss(session)
    }

    /// Ends a helper and reaps it.
    fn dismiss(&mut self, pid: GuestPid) -> GhostResult<()> {
        let Some(body) = self.bodies.remove(&pid) else { return Ok(()) };
        kill(&body)?;
        if let Some(parent) = self.bodies.get(&body.parent) {
            let mut batch = parent.batch();
            batch.may(libc::SYS_wait4, &[pid.0 as u64, 0, libc::__WALL as u64, 0]);
            batch.run()?;
        } else {
            self.init().reap()?;
        }
        Ok(())
    }

    fn create(&mut self, process: &Process, maker: Maker, target: &[Mapping]) -> GhostResult<()> {
        let (host, place) = match maker {
            Maker::Init => {
                let newborn = self.init().spawn_idle(Some(process.pid), TOOLS)?;
                ptrace::seize(newborn.host)?;
                newborn.go()?;
                let executed = await_exec(newborn.host);
                if let (Err(_), Some(why)) = (&executed, newborn.failure()) {
                    return Err(GhostError::refused(format!("process {}", process.pid.0), why));
                }
                executed?;
                let actions = Vec::new();
                (newborn.host, Place { actions, parent: INIT, group: INIT, session: INIT })
            }
            Maker::Parent(parent) => {
                let host = self.clone_by(parent, process, 0)?;
                let maker = &self.bodies[&parent];
                (host, Place { parent, ..maker.place() })
            }
            Maker::Sibling(sibling) => {
                let host = self.clone_by(sibling, process, libc::CLONE_PARENT as u64)?;
                let maker = &self.bodies[&sibling];
                (host, Place { parent: process.parent, ..maker.place() })
            }
        };
        let body = Body::new(process.pid, host, &place, target)?;
        self.bodies.insert(process.pid, body);
        Ok(())
    }

    /// Clones a process that shares its maker's memory for as long as it takes to execute the
    /// idle program: a copy of a large guest's page tables would take long.
    fn clone_by(&self, maker: GuestPid, process: &Process, flags: u64) -> GhostResult<HostPid> {
        let maker = self
            .bodies
            .get(&maker)
            .ok_or_else(|| GhostError::Image(format!("no process {}", maker.0)))?;
        let sibling = flags & libc::CLONE_PARENT as u64 != 0;
        // execve(2) resets the exit signal to SIGCHLD; for another one the memory is copied.
        let usual = process.exit_signal == libc::SIGCHLD || sibling;
        let share = if usual { libc::CLONE_VM as u64 } else { 0 };
        let exit_signal = if sibling { 0 } else { process.exit_signal as u64 };
        let args = CloneArgs { flags: flags | share, exit_signal, ..CloneArgs::default() };
        let host = maker.hands.clone(maker.host, args, process.pid.0)?;
        if usual {
            maker.hands.execute_idle(host, TOOLS[1])?;
        }
        Ok(host)
    }

    /// Process groups: leaders first, then those that join them.
    fn set_groups(&mut self, checkpoint: &Checkpoint) -> GhostResult<()> {
        let wanted = |pid: &GuestPid| checkpoint.processes.iter().find(|p| p.pid == *pid);
        let pids: Vec<GuestPid> = self.bodies.keys().copied().collect();
        let mut joining = Vec::new();
        for pid in pids {
            let Some(group) = wanted(&pid).map(|process| plain(process.group)) else { continue };
            let body = &self.bodies[&pid];
            if body.group == group || body.zombie {
                continue;
            }
            if group == pid { self.join_group(pid, group)? } else { joining.push((pid, group)) }
        }
        let mut helpers = Vec::new();
        for (pid, group) in joining {
            let exists = self.bodies.values().any(|body| body.group == group) || group == INIT;
            if !exists {
                self.lead_group_by_helper(pid, group)?;
                helpers.push(group);
            }
            self.join_group(pid, group)?;
        }
        helpers.into_iter().try_for_each(|helper| self.dismiss(helper))
    }

    fn join_group(&mut self, pid: GuestPid, group: GuestPid) -> GhostResult<()> {
        let Some(body) = self.bodies.get_mut(&pid) else { return Ok(()) };
        let arguments = [0, group.0 as u64];
        body.batch()
            .ask("join process group", libc::SYS_setpgid, &arguments)
            .map_err(|error| GhostError::at(pid)(error.into()))?;
        body.group = group;
        Ok(())
    }

    /// A group whose leader has ended: a child of `member` leads it until the others have joined.
    fn lead_group_by_helper(&mut self, member: GuestPid, group: GuestPid) -> GhostResult<()> {
        let session = self.bodies[&member].session;
        let stand_in = Process {
            pid: group,
            parent: member,
            group,
            session,
            state: ProcessState::Zombie { wait_status: 0, name: String::new() },
            exit_signal: libc::SIGCHLD,
        };
        self.create(&stand_in, Maker::Parent(member), &[])?;
        self.join_group(group, group)
    }

    /// Makes the process's threads those of the image; the leader is there already.
    fn sync_threads(&mut self, pid: GuestPid, wanted: &[Thread]) -> GhostResult<()> {
        let Some(body) = self.bodies.get_mut(&pid) else { return Ok(()) };
        if wanted.first().map(|thread| thread.tid) != Some(pid) {
            return Err(GhostError::refused(format!("process {}", pid.0), "its leader has ended"));
        }
        let (keep, end): (Vec<_>, Vec<_>) = std::mem::take(&mut body.threads)
            .into_iter()
            .partition(|(tid, _)| wanted.iter().any(|thread| thread.tid == *tid));
        body.threads = keep;
        body.dressed.forget_threads(wanted);
        for (_, host) in end {
            body.hands.end(host, libc::SYS_exit, 0)?;
        }
        let shared = libc::CLONE_VM
            | libc::CLONE_FS
            | libc::CLONE_FILES
            | libc::CLONE_SIGHAND
            | libc::CLONE_THREAD
            | libc::CLONE_SYSVSEM;
        for thread in wanted {
            if body.threads.iter().any(|(tid, _)| *tid == thread.tid) {
                continue;
            }
            let args = CloneArgs { flags: shared as u64, ..CloneArgs::default() };
            let host = body.hands.clone(body.host, args, thread.tid.0)?;
            body.threads.push((thread.tid, host));
        }
        Ok(())
    }

    /// Ends the processes that the guest has as zombies, the way they ended there.
    pub(super) fn end_zombies(&mut self, checkpoint: &Checkpoint) -> GhostResult<()> {
        for process in &checkpoint.processes {
            let ProcessState::Zombie { wait_status, name } = &process.state else { continue };
            self.end_zombie(process.pid, *wait_status, name)?;
        }
        Ok(())
    }

    fn end_zombie(&mut self, pid: GuestPid, wait_status: i32, name: &str) -> GhostResult<()> {
        let Some(body) = self.bodies.get_mut(&pid).filter(|body| !body.zombie) else {
            return Ok(());
        };
        end_as(body, wait_status, name).map_err(GhostError::at(pid))?;
        body.zombie = true;
        Ok(())
    }
}

fn check_tree(checkpoint: &Checkpoint) -> GhostResult<()> {
    let mut pids = BTreeSet::from([INIT]);
    let mut spaces = BTreeSet::new();
    for process in &checkpoint.processes {
        if process.pid.0 < 2 || !pids.contains(&process.parent) || !pids.insert(process.pid) {
            return Err(GhostError::Image(format!("process {} out of order", process.pid.0)));
        }
        if let ProcessState::Alive(live) = &process.state
            && !spaces.insert(live.mm)
        {
            let what = format!("process {}", process.pid.0);
            return Err(GhostError::refused(what, "it shares its memory with another (vfork)"));
        }
    }
    Ok(())
}

fn await_exec(host: HostPid) -> GhostResult<()> {
    loop {
        match ptrace::wait(Whose::One(host), true)? {
            Waited::Stopped(_, Stop::Exec { .. }) => return Ok(settle_after_exec(host)?),
            Waited::Stopped(..) => ptrace::cont(host, 0)?,
            Waited::Nothing => {}
            ended @ (Waited::Ended(..) | Waited::NoChildren) => {
                return Err(unexpected(host, ended).into());
            }
        }
    }
}

/// Kills a ghost process and waits until all of it is dead.
fn kill(body: &Body) -> GhostResult<()> {
    let pid = nix::unistd::Pid::from_raw(body.host.0);
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL)
        .map_err(|errno| GhostError::io("end ghost process")(errno.into()))?;
    for (_, host) in body.threads.iter().rev() {
        await_end(*host)?;
    }
    Ok(())
}

fn end_as(body: &mut Body, wait_status: i32, name: &str) -> GhostResult<()> {
    const PR_SET_NAME: u64 = 15;
    for (_, host) in body.threads.drain(1..) {
        body.hands.end(host, libc::SYS_exit, 0)?;
    }
    let mut batch = body.batch();
    let text = batch.text(name.as_bytes());
    batch.must("name process", libc::SYS_prctl, &[PR_SET_NAME, text]);
    batch.run()?;
    let signal = wait_status & 0x7f;
    if signal == 0 {
        return Ok(body.hands.end(body.host, libc::SYS_exit_group, wait_status >> 8 & 0xff)?);
    }
    // The stop after the batch is one from which a signal can be delivered.
    ptrace::set_signal_mask(body.host, ALL_BUT_TRAP & !(1 << (signal - 1)))?;
    ptrace::cont(body.host, signal)?;
    loop {
        match ptrace::wait(Whose::One(body.host), true)? {
            Waited::Ended(..) | Waited::NoChildren => return Ok(()),
            Waited::Stopped(_, Stop::Signal(other)) => ptrace::cont(body.host, other)?,
            Waited::Stopped(..) => ptrace::cont(body.host, 0)?,
            Waited::Nothing => {}
        }
    }
}

impl Body {
    /// The place a child of it inherits.
    fn place(&self) -> Place {
        let actions = self.dressed.actions.clone();
        Place { actions, parent: self.pid, group: self.group, session: self.session }
    }

    fn set_subreaper(&mut self, on: bool) -> GhostResult<()> {
        const PR_SET_CHILD_SUBREAPER: u64 = 36;
        let arguments = [PR_SET_CHILD_SUBREAPER, on.into()];
        self.batch().ask("set subreaper", libc::SYS_prctl, &arguments)?;
        self.subreaper = on;
        Ok(())
    }
}
