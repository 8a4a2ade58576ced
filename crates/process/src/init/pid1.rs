//! What runs inside the guest: the maker of the namespaces, then PID 1.

use std::convert::Infallible;
use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use hotspare_kernel::{pidfd, socket, spawn};
use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::socket::{MsgFlags, recv, send};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Gid, Pid, Uid, chdir, setgid, setgroups, setpgid, setsid, setuid};

use super::{
    Answer, ClockOffsets, FirstProgram, InitError, Request, Result, Surroundings, io_error,
    receive_message, send_message,
};

/// The hidden command `init SOCKET PIDFD`: makes the namespaces, becomes PID 1, serves until the
/// agent ends.
///
/// Returns only an error; the process must then end.
pub fn main(socket: i32, agent: i32) -> Result<Infallible> {
    let socket = spawn::inherited(socket)?;
    let agent = spawn::inherited(agent)?;
    set_pdeathsig(Signal::SIGKILL).map_err(io_error("follow the agent"))?;
    let surroundings = match receive_message(socket.as_fd())? {
        Request::SetUp(surroundings) => surroundings,
        other => return Err(InitError::Refused { what: format!("start with {other:?}") }),
    };
    let forked = unshare_all(surroundings.clocks)
        .and_then(|()| Ok(spawn::fork_alone(libc::CLONE_PARENT as u64, None)?));
    match forked {
        Ok(spawn::Forked::Parent { pid, .. }) => {
            send_message(socket.as_fd(), &Answer::Made { pid })?;
            std::process::exit(0)
        }
        Ok(spawn::Forked::Child) => Pid1 { socket, agent, offered: Vec::new() }.serve(surroundings),
        Err(error) => {
            send_message(socket.as_fd(), &Answer::Failed { what: format!("start: {error}") })?;
            Err(error)
        }
    }
}

fn unshare_all(clocks: ClockOffsets) -> Result<()> {
    let new_time = CloneFlags::from_bits_retain(libc::CLONE_NEWTIME);
    let flags = CloneFlags::CLONE_NEWPID
        | CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWIPC
        | CloneFlags::CLONE_NEWUTS
        | CloneFlags::CLONE_NEWNET
        | new_time;
    unshare(flags).map_err(io_error("make namespaces"))?;
    let line = |clock: &str, ns: i64| {
        let (seconds, rest) = (ns.div_euclid(1_000_000_000), ns.rem_euclid(1_000_000_000));
        format!("{clock} {seconds} {rest}\n")
    };
    let monotonic = line("monotonic", clocks.monotonic_ns);
    let boottime = line("boottime", clocks.boottime_ns);
    std::fs::write("/proc/self/timens_offsets", monotonic + &boottime)
        .map_err(io_error("set the guest's clocks"))
}

struct Pid1 {
    socket: OwnedFd,
    agent: OwnedFd,
    // Kept open until the agent has taken them.
    offered: Vec<OwnedFd>,
}

impl Pid1 {
    fn serve(mut self, surroundings: Surroundings) -> Result<Infallible> {
        let furnished = furnish(&surroundings);
        self.reply(furnished.map(|()| Answer::Done))?;
        let mut children = SigSet::empty();
        children.add(Signal::SIGCHLD);
        children.thread_block().map_err(io_error("block SIGCHLD"))?;
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        let ended = SignalFd::with_flags(&children, flags).map_err(io_error("watch children"))?;
        loop {
            let mut news = [
                PollFd::new(self.socket.as_fd(), PollFlags::POLLIN),
                PollFd::new(ended.as_fd(), PollFlags::POLLIN),
            ];
            match poll(&mut news, PollTimeout::NONE) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(error) => return Err(io_error("wait for requests")(error)),
            }
            let asked = news[0].revents().is_some_and(|events| !events.is_empty());
            while let Ok(Some(_)) = ended.read_signal() {}
            reap();
            if asked {
                let request = receive_message(self.socket.as_fd())?;
                self.serve_one(request)?;
            }
        }
    }

    fn reply(&self, answer: Result<Answer>) -> Result<()> {
        let answer = answer.unwrap_or_else(|error| Answer::Failed { what: error.to_string() });
        send_message(self.socket.as_fd(), &answer)
    }

    fn serve_one(&mut self, request: Request) -> Result<()> {
        self.offered.clear();
        let answer = match request {
            Request::Taken => return Ok(()),
            Request::Reap => {
                reap();
                Ok(Answer::Done)
            }
            Request::SetUp(_) => Err(InitError::Refused { what: "be set up twice".into() }),
            Request::Spawn { program, standard, set_tid } => self.spawn(program, standard, set_tid),
            Request::SpawnIdle { set_tid, tools } => self.spawn_idle(set_tid, tools),
            Request::LastPid(last) => write_sysctl("ns_last_pid", &last.to_string()),
            Request::Names { host, domain } => {
                write_sysctl("hostname", &host).and_then(|_| write_sysctl("domainname", &domain))
            }
        };
        self.reply(answer)
    }

    fn spawn(
        &mut self,
        program: FirstProgram,
        standard: [i32; 3],
        set_tid: Option<i32>,
    ) -> Result<Answer> {
        let mut taken = Vec::new();
        for number in standard {
            taken.push(pidfd::get_fd(self.agent.as_fd(), number)?);
        }
        self.fork(set_tid, move |gate| begin_program(gate, &program, &taken))
    }

    fn spawn_idle(&mut self, set_tid: Option<i32>, tools: [i32; 2]) -> Result<Answer> {
        let agent = self.agent.try_clone().map_err(io_error("duplicate pidfd"))?;
        let idle = spawn::idle_program()?;
        self.fork(set_tid, move |gate| begin_idle(gate, &agent, &idle, tools))
    }

    /// Forks a child that runs `begin` when let go; it says over the gate why `begin` returned.
    fn fork(
        &mut self,
        set_tid: Option<i32>,
        begin: impl FnOnce(BorrowedFd<'_>) -> Result<Infallible>,
    ) -> Result<Answer> {
        let (ours, theirs) = socket::pair(libc::AF_UNIX, libc::SOCK_SEQPACKET)?;
        match spawn::fork_alone(0, set_tid)? {
            spawn::Forked::Child => {
                let Err(why) = begin(theirs.as_fd());
                let text = why.to_string();
                let _ = send(theirs.as_raw_fd(), text.as_bytes(), MsgFlags::MSG_NOSIGNAL);
                std::process::exit(127)
            }
            spawn::Forked::Parent { pidfd, .. } => {
                let answer = Answer::Offered { pidfd: pidfd.as_raw_fd(), gate: ours.as_raw_fd() };
                self.offered = vec![pidfd, ours];
                Ok(answer)
            }
        }
    }
}

fn reap() {
    loop {
        match waitpid(None::<Pid>, Some(WaitPidFlag::WNOHANG | WaitPidFlag::__WALL)) {
            Ok(WaitStatus::StillAlive) | Err(_) => return,
            Ok(_) => {}
        }
    }
}

fn write_sysctl(name: &str, value: &str) -> Result<Answer> {
    std::fs::write(format!("/proc/sys/kernel/{name}"), value)
        .map_err(io_error("write a kernel setting"))?;
    Ok(Answer::Done)
}

fn await_gate(gate: BorrowedFd<'_>) -> Result<()> {
    match recv(gate.as_raw_fd(), &mut [0u8; 1], MsgFlags::empty()) {
        Ok(1) => Ok(()),
        Ok(_) => Err(InitError::Ended),
        Err(error) => Err(io_error("wait to be let go")(error)),
    }
}

fn begin_program(
    gate: BorrowedFd<'_>,
    program: &FirstProgram,
    standard: &[OwnedFd],
) -> Result<Infallible> {
    spawn::default_signals();
    setpgid(Pid::from_raw(0), Pid::from_raw(0)).map_err(io_error("make a process group"))?;
    await_gate(gate)?;
    spawn::close_on_exec_from_3()?;
    for (number, fd) in standard.iter().enumerate() {
        spawn::place_for_exec(fd.as_fd(), number as i32)?;
    }
    chdir(program.directory.as_str()).map_err(io_error("enter the working directory"))?;
    if let Some((user, group)) = program.user {
        setgroups(&[]).map_err(io_error("drop groups"))?;
        setgid(Gid::from_raw(group)).map_err(io_error("set the group"))?;
        setuid(Uid::from_raw(user)).map_err(io_error("set the user"))?;
    }
    let strings = |all: &[String]| -> Result<Vec<CString>> {
        all.iter()
            .map(|text| CString::new(text.as_str()))
            .collect::<std::result::Result<_, _>>()
            .map_err(|_| InitError::Refused { what: "pass a zero byte".into() })
    };
    let arguments = strings(&program.arguments)?;
    let environment = strings(&program.environment)?;
    let first = arguments
        .first()
        .ok_or_else(|| InitError::Refused { what: "run a program without a name".into() })?;
    let path = find_program(first, &environment);
    nix::unistd::execve(&path, &arguments, &environment).map_err(io_error("execute the program"))
}

/// execvp(3)'s rule, along the `PATH` that the program will see.
fn find_program(name: &CString, environment: &[CString]) -> CString {
    let bytes = name.to_bytes();
    if bytes.contains(&b'/') {
        return name.clone();
    }
    let path = environment.iter().find_map(|entry| entry.to_bytes().strip_prefix(b"PATH="));
    for directory in path.unwrap_or(b"/usr/local/bin:/usr/bin:/bin").split(|byte| *byte == b':') {
        let directory = if directory.is_empty() { b"." } else { directory };
        let Ok(candidate) = CString::new([directory, b"/", bytes].concat()) else { continue };
        let executable = nix::unistd::AccessFlags::X_OK;
        if nix::unistd::access(candidate.as_c_str(), executable).is_ok() {
            return candidate;
        }
    }
    name.clone()
}

fn begin_idle(
    gate: BorrowedFd<'_>,
    agent: &OwnedFd,
    idle: &OwnedFd,
    tools: [i32; 2],
) -> Result<Infallible> {
    spawn::default_signals();
    await_gate(gate)?;
    spawn::close_on_exec_from_3()?;
    spawn::place_for_exec(agent.as_fd(), tools[0])?;
    spawn::place_for_exec(idle.as_fd(), tools[1])?;
    for standard in 0..3 {
        nix::unistd::close(standard).map_err(io_error("close standard descriptor"))?;
    }
    chdir("/").map_err(io_error("enter the root directory"))?;
    let flags = nix::fcntl::AtFlags::AT_EMPTY_PATH;
    let none: [CString; 0] = [];
    nix::unistd::execveat(idle, c"", &[c"ghost"], &none, flags)
        .map_err(io_error("execute the idle program"))
}

/// The guest's view of the file system: the host's, read-only but for what was declared.
fn furnish(surroundings: &Surroundings) -> Result<()> {
    set_pdeathsig(Signal::SIGKILL).map_err(io_error("follow the agent"))?;
    setsid().map_err(io_error("make a session"))?;
    let none = None::<&str>;
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(none, "/", none, private, none).map_err(io_error("cut mount propagation"))?;
    for path in &surroundings.writable {
        let (source, target) = (path.source.as_str(), path.target.as_str());
        mount(Some(source), target, none, MsFlags::MS_BIND | MsFlags::MS_REC, none)
            .map_err(io_error("bind a writable path"))?;
    }
    spawn::set_mount_read_only(c"/", true, true)?;
    for path in &surroundings.writable {
        let target = CString::new(path.target.as_str())
            .map_err(|_| InitError::Refused { what: "name a path with a zero byte".into() })?;
        spawn::set_mount_read_only(&target, false, true)?;
    }
    let plain = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("proc"), "/proc", Some("proc"), plain, none).map_err(io_error("mount /proc"))?;
    if std::path::Path::new("/dev/mqueue").is_dir() {
        mount(Some("mqueue"), "/dev/mqueue", Some("mqueue"), plain, none)
            .map_err(io_error("mount /dev/mqueue"))?;
    }
    if std::path::Path::new("/dev/shm").is_dir() {
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        mount(Some("tmpfs"), "/dev/shm", Some("tmpfs"), flags, Some("mode=1777"))
            .map_err(io_error("mount /dev/shm"))?;
    }
    spawn::interface_up("lo")?;
    if let Some(name) = &surroundings.host_name {
        write_sysctl("hostname", name)?;
    }
    if let Some(name) = &surroundings.domain_name {
        write_sysctl("domainname", name)?;
    }
    Ok(())
}
