//! epoll(7).
//!
//! A registration is a pair (open file description, number it had when it was registered). The
//! number may mean something else by now, or nothing, while the description lives on under
//! another; then events still come. So each registration is resolved to the description it watches,
//! and made again under the old number from a descriptor table of its own
//! ([`hotspare_kernel::epoll`]). Only watches on signalfds are made inside the ghost: the kernel
//! ties them to the signals of the process that registers.
//!
//! Not kept: the order of the ready list, and whether an edge (`EPOLLET`) was reported already:
//! after a failover what is ready is reported once more. A disarmed `EPOLLONESHOT` watch may report
//! `EPOLLERR` or `EPOLLHUP` once.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::os::fd::{AsFd, OwnedFd};

use hotspare_image::objects::{Descriptor, EpollWatch, FileId, Object, OpenFile};
use hotspare_image::tree::GuestPid;
use hotspare_kernel::descriptor::{self, Place};
use hotspare_kernel::epoll::{Registration, create, register};

use super::error::{ObjectError, ObjectResult};
use super::fdinfo;
use super::remote_step::RemoteStep;
use super::restore::set_flags;

/// A registration as fdinfo shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Line {
    /// Number at registration.
    pub fd: i32,
    /// `EPOLL*`.
    pub events: u32,
    /// `epoll_data`.
    pub data: u64,
    /// Inode number of what is watched.
    pub inode: u64,
    /// How many lines before this one have the same number.
    pub index: u32,
}

/// Reads the registrations of a detail.
pub fn parse(detail: &[u8]) -> ObjectResult<Vec<Line>> {
    let mut lines = Vec::new();
    let mut before: HashMap<i32, u32> = HashMap::new();
    for line in fdinfo::lines(detail) {
        let fd = fdinfo::decimal(fdinfo::item(line, "tfd")?)? as i32;
        let index = before.entry(fd).and_modify(|count| *count += 1).or_insert(0);
        lines.push(Line {
            fd,
            events: fdinfo::hexadecimal(fdinfo::item(line, "events")?)? as u32,
            data: fdinfo::hexadecimal(fdinfo::item(line, "data")?)?,
            inode: fdinfo::hexadecimal(fdinfo::item(line, "ino")?)?,
            index: *index,
        });
    }
    Ok(lines)
}

/// What instances said at the last stop, so that thousands of lines need not be read again.
#[derive(Debug, Default)]
pub struct Memory {
    said: HashMap<FileId, Said>,
    epoch: u64,
}

#[derive(Debug)]
struct Said {
    detail: Vec<u8>,
    lines: Vec<Line>,
    seen: u64,
}

impl Memory {
    /// A new epoch begins: instances not seen in the last one are forgotten.
    pub fn begin_epoch(&mut self) {
        let last = self.epoch;
        self.said.retain(|_, said| said.seen == last);
        self.epoch += 1;
    }

    /// The registrations of an instance, whose detail this is.
    pub fn lines(&mut self, instance: FileId, detail: &[u8]) -> ObjectResult<&[Line]> {
        let said = match self.said.entry(instance) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let (detail, lines) = Default::default();
                entry.insert(Said { detail, lines, seen: 0 })
            }
        };
        said.seen = self.epoch;
        if said.detail != detail {
            said.lines = parse(detail)?;
            said.detail.clear();
            said.detail.extend_from_slice(detail);
        }
        Ok(&said.lines)
    }
}

/// An open file description that a registration may mean.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    /// Its name.
    pub file: FileId,
    /// A descriptor of it.
    pub place: Place,
    /// It alone has this inode number, so that no comparison is needed.
    pub only: bool,
}

/// The first of `candidates` that `line` of the instance at `epoll` watches.
pub fn resolve(
    line: &Line,
    epoll: Place,
    candidates: impl Iterator<Item = Candidate>,
) -> ObjectResult<Option<FileId>> {
    for candidate in candidates {
        if candidate.only
            || descriptor::is_epoll_target(candidate.place, epoll, line.fd, line.index)?
        {
            return Ok(Some(candidate.file));
        }
    }
    Ok(None)
}

/// The image of a registration whose target was found, else a refusal.
pub fn watch(
    line: &Line,
    found: Option<FileId>,
    process: Option<GuestPid>,
) -> ObjectResult<EpollWatch> {
    let Some(file) = found else {
        let what = format!("an epoll watch on number {}", line.fd);
        let reason = "what it watches is open in no process";
        return Err(ObjectError::transient(what, reason));
    };
    let process = process.unwrap_or_default();
    Ok(EpollWatch { fd: line.fd, events: line.events, data: line.data, file, process })
}

/// Makes an instance without registrations.
pub fn restore(flags: u32) -> ObjectResult<OwnedFd> {
    let file = create()?;
    set_flags(&file, flags)?;
    Ok(file)
}

/// Makes the registrations of all instances in `files`, except those that must be made inside the
/// ghost, which are returned. `made` are all open files, `tables` the descriptor tables.
pub fn restore_watches(
    files: &[OpenFile],
    made: &std::collections::BTreeMap<FileId, OwnedFd>,
    tables: &[(GuestPid, &[Descriptor])],
) -> ObjectResult<Vec<RemoteStep>> {
    let objects: HashMap<FileId, &Object> =
        files.iter().map(|file| (file.id, &file.object)).collect();
    let mut registrations = Vec::new();
    let mut steps = Vec::new();
    for file in files {
        let Object::Epoll(image) = &file.object else { continue };
        for watch in &image.watches {
            if let Some(Object::SignalFd(_)) = objects.get(&watch.file) {
                steps.push(remote(watch, file.id, tables)?);
                continue;
            }
            let (Some(epoll), Some(target)) = (made.get(&file.id), made.get(&watch.file)) else {
                let missing = watch.file;
                return Err(ObjectError::Image(format!("epoll watches no file {missing}")));
            };
            registrations.push(Registration {
                epoll: epoll.as_fd(),
                target: target.as_fd(),
                number: watch.fd,
                events: watch.events,
                data: watch.data,
            });
        }
    }
    register(&registrations)?;
    Ok(steps)
}

fn remote(
    watch: &EpollWatch,
    epoll: FileId,
    tables: &[(GuestPid, &[Descriptor])],
) -> ObjectResult<RemoteStep> {
    let table = tables.iter().find(|(pid, _)| *pid == watch.process).map(|(_, table)| *table);
    let instance = table.and_then(|table| table.iter().find(|each| each.file == epoll));
    let Some(instance) = instance else {
        let reason = "no process has both the epoll instance and the signalfd it watches";
        return Err(ObjectError::refused("an epoll watch on a signalfd", reason));
    };
    Ok(RemoteStep::Watch {
        process: watch.process,
        epoll: instance.fd,
        target: watch.fd,
        events: watch.events,
        data: watch.data,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registrations_are_read_as_the_kernel_shows_them() {
        let detail =
            b"tfd:        3 events:       1d data:                3  pos:0 ino:40e sdev:10\n\
            tfd:        3 events: 80000001 data: ffffffffffffffff  pos:0 ino:b59a sdev:f\n";
        let lines = parse(detail).unwrap();
        assert_eq!((lines[0].fd, lines[0].events, lines[0].inode), (3, 0x1d, 0x40e));
        assert_eq!((lines[0].index, lines[1].index), (0, 1));
        assert_eq!((lines[1].events, lines[1].data), (0x8000_0001, u64::MAX));
    }
}
