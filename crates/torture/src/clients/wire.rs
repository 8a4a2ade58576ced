//! The protocols of key-value servers: how to say set and get, and what answers mean.

use super::connection::{ClientError, Connection};
use super::http::take_reply;
use super::iproto;

/// A key-value protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// RESP, as redis-server speaks it.
    Redis,
    /// The text protocol of memcached.
    Memcached,
    /// `SET key value` and `GET key`, a line each, as `examples/go-kv` speaks it.
    Line,
    /// PUT and GET of JSON texts at `/store/key`, as `examples/py-http` serves them.
    HttpStore,
    /// The binary protocol of Tarantool.
    Tarantool,
}

impl Protocol {
    /// Appends a request that stores `value`, a text without spaces or line ends.
    pub fn put_set(self, request: &mut Vec<u8>, key: &str, value: &str) {
        let value_bytes = value.len();
        let said = match self {
            Protocol::Tarantool => return iproto::put_set(request, key, value),
            Protocol::Redis => resp(&["SET", key, value]),
            Protocol::Memcached => format!("set {key} 0 0 {value_bytes}\r\n{value}\r\n"),
            Protocol::Line => format!("SET {key} {value}\n"),
            Protocol::HttpStore => format!(
                "PUT /store/{key} HTTP/1.1\r\nHost: lab\r\nContent-Length: {}\r\n\r\n\"{value}\"",
                value_bytes + 2
            ),
        };
        request.extend_from_slice(said.as_bytes());
    }

    /// Appends a request for the value of `key`.
    pub fn put_get(self, request: &mut Vec<u8>, key: &str) {
        let said = match self {
            Protocol::Tarantool => return iproto::put_get(request, key),
            Protocol::Redis => resp(&["GET", key]),
            Protocol::Memcached => format!("get {key}\r\n"),
            Protocol::Line => format!("GET {key}\n"),
            Protocol::HttpStore => format!("GET /store/{key} HTTP/1.1\r\nHost: lab\r\n\r\n"),
        };
        request.extend_from_slice(said.as_bytes());
    }

    /// Takes the reply to a set.
    pub fn take_set(self, connection: &mut Connection) -> Result<(), ClientError> {
        let good: &[u8] = match self {
            Protocol::Tarantool => return iproto::take(connection).map(drop),
            Protocol::Redis => b"+OK",
            Protocol::Memcached => b"STORED",
            Protocol::Line => b"OK",
            Protocol::HttpStore => {
                let (status, body) = take_reply(connection)?;
                let is_good = status == 200;
                return is_good.then_some(()).ok_or_else(|| unexpected("a set", &body));
            }
        };
        let line = connection.line()?;
        if line == good { Ok(()) } else { Err(unexpected("a set", line)) }
    }

    /// Takes the reply to a get; `None` if the server has no such key.
    pub fn take_get(self, connection: &mut Connection) -> Result<Option<String>, ClientError> {
        match self {
            Protocol::Redis => take_redis(connection),
            Protocol::Memcached => take_memcached(connection),
            Protocol::Line => take_line(connection),
            Protocol::HttpStore => take_json(connection),
            Protocol::Tarantool => match iproto::take(connection)?.first() {
                None => Ok(None),
                Some(tuple) => iproto::value(tuple)
                    .map(Some)
                    .ok_or_else(|| unexpected("a get", tuple.to_string().as_bytes())),
            },
        }
    }
}

/// A command of Redis in RESP: <https://redis.io/docs/latest/develop/reference/protocol-spec/>.
pub(crate) fn resp(words: &[&str]) -> String {
    let mut said = format!("*{}\r\n", words.len());
    for word in words {
        let bytes = word.len().to_string();
        for piece in ["$", &bytes, "\r\n", word, "\r\n"] {
            said.push_str(piece);
        }
    }
    said
}

fn take_redis(connection: &mut Connection) -> Result<Option<String>, ClientError> {
    let line = connection.line()?;
    if line == b"$-1" {
        return Ok(None);
    }
    let count = line.strip_prefix(b"$").and_then(number);
    let count = count.ok_or_else(|| unexpected("a get", line))?;
    let value = text(connection.bytes(count)?)?;
    connection.line()?;
    Ok(Some(value))
}

fn take_memcached(connection: &mut Connection) -> Result<Option<String>, ClientError> {
    let line = connection.line()?;
    if line == b"END" {
        return Ok(None);
    }
    if !line.starts_with(b"VALUE ") {
        return Err(unexpected("a get", line));
    }
    let count = line.rsplit(|byte| *byte == b' ').next().and_then(number);
    let count = count.ok_or_else(|| unexpected("a get", line))?;
    let value = text(connection.bytes(count)?)?;
    connection.line()?;
    let end = connection.line()?;
    if end == b"END" { Ok(Some(value)) } else { Err(unexpected("a get", end)) }
}

fn take_line(connection: &mut Connection) -> Result<Option<String>, ClientError> {
    let line = connection.line()?;
    if line == b"NONE" {
        return Ok(None);
    }
    match line.strip_prefix(b"VALUE ") {
        Some(value) => Ok(Some(text(value)?)),
        None => Err(unexpected("a get", line)),
    }
}

/// A JSON text without anything that needs a backslash.
fn take_json(connection: &mut Connection) -> Result<Option<String>, ClientError> {
    let (status, body) = take_reply(connection)?;
    let value = body.trim_ascii().strip_prefix(b"\"").and_then(|body| body.strip_suffix(b"\""));
    match (status, value) {
        (404, _) => Ok(None),
        (200, Some(value)) => Ok(Some(text(value)?)),
        _ => Err(unexpected("a get", &body)),
    }
}

fn number(digits: &[u8]) -> Option<usize> {
    std::str::from_utf8(digits).ok()?.parse().ok()
}

fn text(bytes: &[u8]) -> Result<String, ClientError> {
    String::from_utf8(bytes.to_vec()).map_err(|_| unexpected("a get", bytes))
}

fn unexpected(request: &str, said: &[u8]) -> ClientError {
    let said = String::from_utf8_lossy(&said[..said.len().min(100)]).into_owned();
    ClientError::Wrong(format!("to {request} the server said {said:?}"))
}
