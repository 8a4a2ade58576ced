//! A store that speaks as much of S3 as a restore asks for, at the end of a line of a given
//! bandwidth and round trip. What is learned at a restart is taken and thrown away, so that each
//! one begins alike.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// Bytes that go over the line at a time: what one answer can be behind another.
const PACKET_BYTES: usize = 16 << 10;
const DATE: &str = "Sun, 22 Nov 2026 00:00:00 GMT";

/// The line, and what has gone over it.
#[derive(Debug)]
pub struct Line {
    bytes_per_second: u64,
    round_trip: Duration,
    free_at: Mutex<Instant>,
    /// Requests that were answered.
    pub requests: AtomicU64,
    /// Bytes of answers.
    pub bytes: AtomicU64,
}

impl Line {
    pub fn new(megabytes_per_second: u64, round_trip: Duration) -> Self {
        Self {
            bytes_per_second: megabytes_per_second << 20,
            round_trip,
            free_at: Mutex::new(Instant::now()),
            requests: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        }
    }

    /// When so many bytes have left, one packet after another.
    fn take(&self, bytes: usize) -> Instant {
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        let mut free_at = self.free_at.lock().unwrap_or_else(PoisonError::into_inner);
        let time = Duration::from_secs_f64(bytes as f64 / self.bytes_per_second as f64);
        *free_at = (*free_at).max(Instant::now()) + time;
        *free_at
    }
}

/// Answers for what is in `directory` until this program ends.
pub fn serve(listener: &TcpListener, directory: &Path, line: &Arc<Line>) {
    for stream in listener.incoming().flatten() {
        let (directory, line) = (directory.to_owned(), line.clone());
        std::thread::spawn(move || {
            // A client that is killed has nobody to tell.
            let _ = Connection { stream, directory, line }.serve();
        });
    }
}

struct Connection {
    stream: TcpStream,
    directory: PathBuf,
    line: Arc<Line>,
}

/// A request, as far as it matters.
struct Request {
    method: String,
    path: String,
    query: String,
    range: Option<(u64, u64)>,
}

impl Connection {
    fn serve(mut self) -> Result<()> {
        self.stream.set_nodelay(true)?;
        let mut reader = BufReader::new(self.stream.try_clone()?);
        while let Some(request) = read(&mut reader)? {
            // The request is on its way for one half of it, the answer for the other.
            std::thread::sleep(self.line.round_trip);
            self.line.requests.fetch_add(1, Ordering::Relaxed);
            self.answer(&request)?;
        }
        Ok(())
    }

    fn answer(&mut self, request: &Request) -> Result<()> {
        // Of path style: the bucket comes first.
        let key = request.path.trim_start_matches('/').split_once('/').map_or("", |(_, key)| key);
        match request.method.as_str() {
            "PUT" => self.send("200 OK", "ETag: \"0\"\r\n", &[]),
            "GET" if request.query.contains("list-type=2") => {
                let listing = list(&self.directory, &request.query)?;
                self.send("200 OK", "Content-Type: application/xml\r\n", listing.as_bytes())
            }
            "GET" => match File::open(self.directory.join(key)) {
                Ok(file) => self.object(&file, request.range),
                Err(_) => {
                    let text = "<Error><Code>NoSuchKey</Code><Message>none</Message></Error>";
                    self.send("404 Not Found", "Content-Type: application/xml\r\n", text.as_bytes())
                }
            },
            other => bail!("a restore does not {other}"),
        }
    }

    fn object(&mut self, file: &File, range: Option<(u64, u64)>) -> Result<()> {
        let length = file.metadata()?.len();
        let (start, end) = range.map_or((0, length), |(from, to)| (from, (to + 1).min(length)));
        let mut bytes = vec![0; end.saturating_sub(start) as usize];
        file.read_exact_at(&mut bytes, start)?;
        let head = format!("ETag: \"{length}\"\r\nLast-Modified: {DATE}\r\n");
        match range {
            None => self.send("200 OK", &head, &bytes),
            Some(_) => {
                let last = end.saturating_sub(1);
                let head = format!("{head}Content-Range: bytes {start}-{last}/{length}\r\n");
                self.send("206 Partial Content", &head, &bytes)
            }
        }
    }

    fn send(&mut self, status: &str, head: &str, body: &[u8]) -> Result<()> {
        let length = body.len();
        let head = format!("HTTP/1.1 {status}\r\n{head}Content-Length: {length}\r\n\r\n");
        self.stream.write_all(head.as_bytes())?;
        for packet in body.chunks(PACKET_BYTES) {
            let at = self.line.take(packet.len());
            std::thread::sleep(at.saturating_duration_since(Instant::now()));
            self.stream.write_all(packet)?;
        }
        Ok(())
    }
}

/// The next request; none when the client has gone.
fn read(reader: &mut BufReader<TcpStream>) -> Result<Option<Request>> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let mut words = line.split_ascii_whitespace();
    let (method, target) = (words.next().context("a method")?, words.next().context("a target")?);
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let mut request = Request {
        method: method.to_owned(),
        path: decoded(path),
        query: query.to_owned(),
        range: None,
    };
    let mut body = 0;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let line = line.trim_end().to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(length) = line.strip_prefix("content-length:") {
            body = length.trim().parse()?;
        }
        if let Some(range) = line.strip_prefix("range: bytes=") {
            let (from, to) = range.split_once('-').context("a range")?;
            request.range = Some((from.parse()?, to.parse().unwrap_or(u64::MAX - 1)));
        }
    }
    std::io::copy(&mut reader.take(body), &mut std::io::sink())?;
    Ok(Some(request))
}

/// `%2F` and its like.
fn decoded(text: &str) -> String {
    let mut parts = text.split('%');
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        let code = part.get(..2).and_then(|code| u8::from_str_radix(code, 16).ok());
        match code {
            Some(code) => {
                bytes.push(code);
                bytes.extend_from_slice(&part.as_bytes()[2..]);
            }
            None => bytes.extend_from_slice(part.as_bytes()),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The answer to a `ListObjectsV2`, without pages: a bench has few objects.
fn list(directory: &Path, query: &str) -> Result<String> {
    let value = |name: &str| {
        let found = query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
        decoded(found.unwrap_or_default())
    };
    let prefix = value("prefix");
    let folder = directory.join(&prefix);
    let mut names: Vec<(String, u64)> = Vec::new();
    if folder.is_dir() {
        for entry in std::fs::read_dir(&folder)? {
            let (entry, prefix) = (entry?, prefix.trim_end_matches('/'));
            let name = entry.file_name().to_string_lossy().into_owned();
            names.push((format!("{prefix}/{name}"), entry.metadata()?.len()));
        }
    }
    names.sort();
    let each = names.iter().map(|(name, bytes)| {
        format!(
            "<Contents><Key>{name}</Key><LastModified>2026-11-22T00:00:00.000Z</LastModified>\
             <ETag>\"0\"</ETag><Size>{bytes}</Size></Contents>"
        )
    });
    let each: String = each.collect();
    Ok(format!(
        "<?xml version=\"1.0\"?><ListBucketResult><Name>b</Name><Prefix>{prefix}</Prefix>\
         <KeyCount>{}</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>{each}\
         </ListBucketResult>",
        names.len()
    ))
}
