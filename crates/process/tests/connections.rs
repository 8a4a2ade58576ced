//! TCP sockets whose marks are the same are what they were: a look that remembers sees what a look
//! sees that asks about everything.

#[allow(dead_code, reason = "shared with other tests")]
mod common;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::path::Path;

use common::{Capturing, Guest, Image, Opened};
use hotspare_image::objects::{FileId, Object};
use hotspare_image::sockets::{TcpSocket, TcpState};
use hotspare_kernel::marks::Marks;
use hotspare_process::capture::prepare_marks;
use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};

const CONNECTIONS: usize = 12;
const TURNS: u32 = 60;

/// Not a test of its own: the guest of the others.
#[test]
fn guest_side() {
    common::play(&[("connections", change_connections)]);
}

fn stream(fd: &OwnedFd) -> TcpStream {
    TcpStream::from(fd.try_clone().expect("duplicates"))
}

fn pair(listener: &TcpListener) -> [OwnedFd; 2] {
    let near = TcpStream::connect(listener.local_addr().expect("is bound")).expect("connects");
    let (far, _) = listener.accept().expect("accepts");
    near.set_nonblocking(true).expect("sets");
    far.set_nonblocking(true).expect("sets");
    [near.into(), far.into()]
}

/// Has the epoll instance watch an end, with other events in each turn.
fn watch(epoll: &OwnedFd, end: &OwnedFd, turn: u32) {
    let epoll = Epoll(epoll.try_clone().expect("duplicates"));
    let mut event = EpollEvent::new(EpollFlags::EPOLLIN, u64::from(turn));
    if epoll.add(end, event).is_err() {
        epoll.modify(end, &mut event).expect("is watched");
    }
}

/// A listener and an epoll instance, then both ends of each connection, then second descriptors of
/// some; each turn does something to a few.
fn change_connections(_: &Path, turn: u32, opened: &mut Opened) {
    if turn == 0 {
        let any: SocketAddr = "127.0.0.1:0".parse().expect("an address");
        let listener = TcpListener::bind(any).expect("binds");
        let pairs: Vec<_> = (0..CONNECTIONS).flat_map(|_| pair(&listener)).collect();
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).expect("makes an instance");
        pairs.iter().step_by(2).for_each(|end| watch(&epoll.0, end, turn));
        opened.extend([("listener", listener.into()), ("epoll", epoll.0)]);
        opened.extend(pairs.into_iter().map(|end| ("end", end)));
        return;
    }
    let first = opened.iter().position(|(name, _)| *name == "end").expect("there are ends");
    let mut dice = u64::from(turn) * 0x9e37_79b9_7f4a_7c15;
    let mut throw = |below: usize| {
        dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (dice >> 33) as usize % below
    };
    let even = turn.is_multiple_of(2);
    for _ in 0..3 {
        let (near, far) = (first + 2 * throw(CONNECTIONS), throw(2));
        let far = near + far;
        match throw(10) {
            0 | 1 => drop(stream(&opened[near].1).write(&[b'x'; 700][..1 + throw(600)])),
            2 => drop(stream(&opened[far].1).read(&mut [0; 300])),
            3 => drop(stream(&opened[far].1).shutdown(Shutdown::Write)),
            4 => {
                let listener = TcpListener::from(opened[0].1.try_clone().expect("duplicates"));
                let [one, other] = pair(&listener);
                (opened[near].1, opened[near + 1].1) = (one, other);
            }
            5 => {
                let flag = if even { FdFlag::empty() } else { FdFlag::FD_CLOEXEC };
                fcntl(&opened[far].1, FcntlArg::F_SETFD(flag)).expect("sets");
            }
            6 => opened.push(("twin", opened[far].1.try_clone().expect("duplicates"))),
            7 if opened.last().is_some_and(|(name, _)| *name == "twin") => drop(opened.pop()),
            7 | 8 => watch(&opened[1].1, &opened[far].1, turn),
            _ => {
                let flag = if even { OFlag::empty() } else { OFlag::O_APPEND };
                fcntl(&opened[far].1, FcntlArg::F_SETFL(flag | OFlag::O_NONBLOCK)).expect("sets");
            }
        }
    }
}

/// Flags, first number of the same socket, socket.
type Socket = (bool, u32, i32, TcpSocket);
/// Number, events, data, first number of the socket.
type Watch = (i32, u32, u64, i32);

/// By number, without the clock of their timestamps and without options, which are read in turns.
fn sockets(image: &Image) -> BTreeMap<i32, Socket> {
    let each = image.tables[0].iter().filter_map(|descriptor| {
        let file = image.files.iter().find(|file| file.id == descriptor.file)?;
        let Object::Tcp(socket) = &file.object else { return None };
        let mut socket = socket.clone();
        socket.options.clear();
        if let TcpState::Connected(connection) = &mut socket.state {
            connection.timestamp = connection.timestamp.map(|clock| clock & 1);
        }
        let first = first_of(image, descriptor.file);
        Some((descriptor.fd, (descriptor.close_on_exec, file.flags, first, socket)))
    });
    each.collect()
}

fn first_of(image: &Image, file: FileId) -> i32 {
    let same = image.tables[0].iter().filter(|descriptor| descriptor.file == file);
    same.map(|descriptor| descriptor.fd).min().expect("is open")
}

/// What the epoll instance watches.
fn watches(image: &Image) -> Vec<Watch> {
    let each = image.files.iter().filter_map(|file| match &file.object {
        Object::Epoll(instance) => Some(&instance.watches),
        _ => None,
    });
    let each = each.flatten();
    each.map(|each| (each.fd, each.events, each.data, first_of(image, each.file))).collect()
}

fn all_of(image: &Image) -> (BTreeMap<i32, Socket>, Vec<Watch>) {
    (sockets(image), watches(image))
}

#[test]
fn a_look_that_remembers_sees_what_one_sees_that_asks() {
    prepare_marks();
    assert!(Marks::loaded().is_some_and(|marks| marks.sockets.is_ok()), "no marks of sockets");
    let directory = tempfile::tempdir().expect("makes a directory");
    let mut guest = Guest::start("connections", directory.path());
    let mut kept = Capturing::of(&guest);
    let (mut changed, mut rested) = (0, 0);
    let mut last = Default::default();
    for turn in 0..TURNS {
        let ask = || all_of(&Capturing::of(&guest).capture(&[guest.process()]).expect("looks"));
        let (looks, asked) = loop {
            let before = ask();
            // The second look knows everything and asks nothing; at the last most sockets rest.
            let mut look = || all_of(&kept.capture(&[guest.process()]).expect("looks"));
            let looks = [look(), look(), look()];
            // The kernel acknowledges on its own.
            if ask() == before {
                break (looks, before);
            }
        };
        assert!(asked.0.len() > CONNECTIONS, "{} sockets", asked.0.len());
        for (number, (seen, watched)) in looks.iter().enumerate() {
            for (fd, socket) in &asked.0 {
                assert_eq!(seen.get(fd), Some(socket), "turn {turn}, look {number}");
            }
            assert_eq!(seen.len(), asked.0.len(), "turn {turn}");
            assert_eq!(*watched, asked.1, "turn {turn}, look {number}");
        }
        changed += u32::from(asked != last);
        rested += kept.kept.resting_files().count();
        last = asked;
        guest.turn();
    }
    assert!(changed > TURNS / 2, "the guest changed its sockets {changed} times");
    assert!(rested > CONNECTIONS * TURNS as usize, "{rested} sockets rested in all turns");
    guest.end();
}
